"""Texts shown with their scores: Figure 7."""

import json
from pathlib import Path

import pytest

from dodo.errors import InputError
from dodo.evaluation.highlight import Highlight, inspection_in
from dodo.evaluation.methods import make_method
from dodo.evaluation.report import read_results, write_figures, write_report
from dodo.evaluation.run import evaluate
from dodo.evaluation.tasks import Item
from dodo.inspection import inspect_text
from dodo.model import Dodo
from tests.cli.tiny import TEXT, save_model

LINE = TEXT.split("\n")[0]  # in letters that every font has


@pytest.fixture(scope="module")
def dodo(tmp_path_factory: pytest.TempPathFactory) -> Dodo:
    return Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("highlight") / "base"))


def test_a_record_shows_what_an_inspection_does_and_the_page_draws_it(dodo: Dodo, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    from dodo.inspection_png import to_png

    (tmp_path / "dodo.txt").write_text(LINE, encoding="utf-8")
    record = evaluate(
        dodo, "highlight", ratio=4.0, sources=[str(tmp_path / "dodo.txt")], out=tmp_path / "results" / "h.json", examples=1
    )
    read = json.loads((tmp_path / "results" / "h.json").read_text())
    seen = inspect_text(dodo, LINE, ratio=4.0, use="text")
    assert inspection_in(read["examples"][0]) == seen
    assert record["measured"]["all"]["states each"] == seen.states
    results = read_results(tmp_path / "results")
    (drawn,) = write_figures(results, tmp_path / "figures")
    assert drawn.read_bytes() == to_png(seen, title="dodo.txt")
    write_report(results, tmp_path / "results.md", [drawn])
    assert "![A text and its nuggets (Figure 7)](figures/highlight.text.png)" in (tmp_path / "results.md").read_text()


def test_punctuation_is_counted_among_nuggets_and_in_the_text() -> None:
    """Of 8 tokens 2 are marks, and of 3 nuggets 1; by hand, in two texts."""
    items = [Item("a", "?", "all"), Item("b", "?", "all")]
    kept = {"states": 2, "tokens": 8, "bytes": 16}
    made = {
        "a": {"nuggets": 2, "marks": 1, "of the text": 5, "marks of the text": 1, **kept},
        "b": {"nuggets": 1, "marks": 0, "of the text": 3, "marks of the text": 1, **kept},
    }
    found = Highlight().measure(items, made)["all"]
    assert (found["n"], found["nuggets"]) == (2, 3)
    assert found["punctuation: share of nuggets"] == pytest.approx(1 / 3)
    assert found["punctuation: share of text"] == 0.25


def test_marks_are_tokens_without_letters_and_digits(dodo: Dodo) -> None:
    text = "Is it, or not?"
    (row,) = Highlight().run(make_method("dodo", dodo, 1.0), [Item("a", text, "all")])
    pieces = [text[token.start : token.end].strip() for token in inspect_text(dodo, text, ratio=1.0).tokens]
    shown = [piece for piece in pieces if piece]
    marks = [piece for piece in shown if piece in (",", "?")]
    assert (row["of the text"], row["marks of the text"]) == (len(shown), len(marks))
    assert row["nuggets"] == len(shown)  # at r = 1 all are
    assert row["marks"] == len(marks) > 0


def test_what_has_no_scores_is_refused(dodo: Dodo) -> None:
    for name in ("stride", "full"):
        with pytest.raises(InputError, match=f"method '{name}' has no scores to show"):
            Highlight().run(make_method(name, dodo, 4.0), [Item("a", TEXT, "all")])
