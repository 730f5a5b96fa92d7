"""Laws of perplexity by position in bounded memory."""

import json
import math
from pathlib import Path

import pytest
import torch

from dodo.errors import InputError
from dodo.evaluation import endless
from dodo.evaluation.endless import READERS, Endless, make_reader
from dodo.evaluation.run import evaluate
from dodo.model import Dodo
from dodo.thresholds import Thresholds
from tests.cli.tiny import TEXT, save_model
from tests.conftest import stir

STATES = 12


@pytest.fixture(scope="module")
def dodo(tmp_path_factory: pytest.TempPathFactory) -> Dodo:
    made = Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("endless") / "base"))
    stir(made.compressor)
    made.thresholds = Thresholds(ratios=(2, 10), values=(-1.0, 0.0), tokens=99, feature_window=64)
    return made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STRETCH": 32, "PIECE": 8, "SEGMENT": 4}.items():
        monkeypatch.setattr(endless, name, value)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in (TEXT * 2, "short", TEXT)), encoding="utf-8")
    return path


def test_full_is_the_base_stretch_by_stretch(dodo: Dodo, texts: Path) -> None:
    task = Endless(dodo)
    items = task.items([str(texts)], 100, 0)
    assert len(items) == 2
    made = {item.key: row for item, row in zip(items, task.run(make_reader("full", dodo, 10, STATES), items), strict=True)}
    sums, counts = [0.0] * 4, [0] * 4
    for text in (TEXT * 2, TEXT):
        ids = torch.tensor([dodo.document_ids(text)[:100]])
        with torch.no_grad(), dodo.compressor.adapters.use(None):
            nats = torch.nn.functional.cross_entropy(dodo.compressor.base(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for i, value in enumerate(nats.tolist()):
            sums[i // 32] += value
            counts[i // 32] += 1
    found = task.measure(items, made)
    for i in range(4):
        stretch = found[f"tokens from {32 * i}"]
        assert stretch["n"] == counts[i]
        assert stretch["perplexity"] == pytest.approx(math.exp(sums[i] / counts[i]), rel=1e-3)
    assert found["all"] == {"texts": 2, "states held at most": 100, "bytes held at most": made["0"]["bytes"]}
    each = task.each(items, made)
    assert [len(each[f"tokens from {32 * i}"]) for i in range(4)] == [8, 8, 8, 2]
    assert sum(each["tokens from 0"]) / 8 == pytest.approx(sums[0] / counts[0], abs=1e-4)


@pytest.mark.parametrize("method", ["dodo", "window"])
def test_streams_hold_no_more_than_they_say_and_predict_every_token(dodo: Dodo, texts: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "record.json"
    record = evaluate(dodo, "endless", method=method, ratio=2, sources=[str(texts)], states=[STATES], out=out)
    measured = record["measured"]
    assert measured["all"]["states held at most"] == STATES
    lengths = [len(dodo.document_ids(text)) for text in (TEXT * 2, TEXT)]
    assert sum(values["n"] for name, values in measured.items() if name != "all") == sum(lengths) - 2
    assert all(values["perplexity"] > 1 for name, values in measured.items() if name != "all")
    assert json.loads(out.read_text())["settings"]["states"] == STATES


def test_the_window_alone_is_what_the_base_sees_of_it(dodo: Dodo, texts: Path) -> None:
    """Within the first states that are held, a stream without nuggets is theta on the whole text."""
    ids = torch.tensor(dodo.document_ids(TEXT)[:8])
    (logits, states, held), *_ = make_reader("window", dodo, 10, STATES)(ids)
    with torch.no_grad(), dodo.compressor.adapters.mixed(torch.arange(8)[None] < int(dodo.config.keep_first)):
        torch.testing.assert_close(logits, dodo.compressor.base(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    assert states == 8
    assert held > 0


def test_what_can_not_be_is_refused(dodo: Dodo, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"methods are {', '.join(READERS)}"):
        make_reader("compressive", dodo, 10, STATES)
    with pytest.raises(InputError, match="8 states are too few"):
        make_reader("dodo", dodo, 10, 8)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(InputError, match="no text has more than 32 tokens"):
        Endless(dodo).items([str(tmp_path / "short.txt")], None, 0)
    (tmp_path / "long.txt").write_text(TEXT)
    with pytest.raises(InputError, match="--limit must be above 32 tokens"):
        Endless(dodo).items([str(tmp_path / "long.txt")], 32, 0)
