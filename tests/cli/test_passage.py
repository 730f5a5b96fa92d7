"""Laws of `dodo report --passage`: Figure 7 on the page of results."""

import json

import pytest

from dodo.inspection import inspect_text
from dodo.inspection_png import to_png
from dodo.model import Dodo
from tests.cli.tiny import TEXT

pytest.importorskip("matplotlib", reason="figures need matplotlib")


@pytest.fixture
def flags(tmp_path):
    settings = {"task": "squad", "method": "full", "ratio": None, "data": ["squad.jsonl"], "base": "tiny"}
    record = {"name": "a", "commit": None, "settings": settings, "measured": {"all": {"n": 1, "accuracy": 1.0}}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(record), encoding="utf-8")
    return ("report", "--results", tmp_path / "results", "--out", tmp_path / "docs" / "results.md")


@pytest.fixture
def passage(tmp_path):
    path = tmp_path / "dodo.txt"
    path.write_text(TEXT.split("\n")[0], encoding="utf-8")  # in letters that every font has
    return path


def test_a_passage_is_drawn_and_shown_until_it_is_drawn_again(run, models, passage, flags, tmp_path):
    page, picture = tmp_path / "docs" / "results.md", tmp_path / "docs" / "figures" / "passage.png"
    assert run(*flags).exit_code == 0
    assert "Figure 7" not in page.read_text()
    assert run(*flags, "--passage", passage, "--model", models.trained).exit_code == 0
    seen = inspect_text(Dodo.from_pretrained(models.trained), passage.read_text(encoding="utf-8"), ratio=10)
    assert picture.read_bytes() == to_png(seen, title=passage.name)
    for _ in range(2):
        assert "![A passage and its nuggets](figures/passage.png)" in page.read_text()
        assert run(*flags).exit_code == 0


def test_a_passage_without_figures_is_refused(run, no_model, passage, flags):
    refused = run(*flags, "--passage", passage, "--no-figures")
    assert refused.exit_code == 2
    assert f"--passage {passage}: has no effect with --no-figures" in refused.stderr
