"""The benchmarks' own parts still fit together; what they measure is not tested."""

import importlib
from pathlib import Path

import pytest

from tests.standins.models import save_base, tiny_llama


def test_the_ways_to_take_a_training_step_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    training = importlib.import_module("training")
    monkeypatch.setattr(training, "BASE", str(save_base(tmp_path / "base", model=tiny_llama(num_hidden_layers=4))))
    monkeypatch.setattr(training, "TOKENS", 64)
    monkeypatch.setattr(training, "ROUNDS", 1)
    training._write_adapters(tmp_path)
    tables = training._measure("float32", tmp_path)  # ends with SystemExit where nuggets, losses or gradients differ
    assert tables["float32"]["ours: loss, nats per token"] == pytest.approx(tables["float32"]["authors': loss, nats per token"])
    assert tables["float32: where our time goes, share"]["features and scores"] > 0
