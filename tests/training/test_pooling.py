"""Training of the baseline that averages."""

import dataclasses
from pathlib import Path

import pytest
import torch

from dodo.compressive import Compressive
from dodo.data.batches import Batch
from dodo.errors import InputError
from dodo.training.objectives import batch_loss
from dodo.training.recipe import load_recipe
from dodo.training.run import train
from tests.conftest import stir, tokens
from tests.training.test_training import AUTOREGRESSIVE, recipe_file  # noqa: F401 (a fixture)

COMPRESSIVE = [*AUTOREGRESSIVE, "model=compressive", "mixture.ratio={low: 3.0, mode: 3.0, high: 3.0}"]


def batch(window: int = 3) -> Batch:
    ids = tokens(3, 24)
    real = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    nothing = ids[:, :0]
    return Batch("autoregressive", 3.0, ids[:, :-1], real, nothing, nothing.bool(), ids[:, 1:], window=window, segment=4)


def test_the_loss_is_that_of_every_token_after_the_first(pair) -> None:
    compressor = stir(pair().compressor)
    for window in (3, 5):
        loss = batch_loss(compressor, batch(window), "pooled")
        logits = Compressive(compressor, ratio=3, window=window, segment=4).forward(batch().documents)
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch().targets.flatten(), reduction="sum")
        assert loss.tokens == 3 * 23
        assert loss.sum == pytest.approx(float(nats.detach()), rel=1e-4)
        assert float(loss.total.detach()) == pytest.approx(loss.sum / loss.tokens, rel=1e-5)


def test_no_more_groups_are_seen_than_are_held(pair) -> None:
    compressor = stir(pair().compressor)
    loss = batch_loss(compressor, dataclasses.replace(batch(), nuggets=2), "pooled")
    logits = Compressive(compressor, ratio=3, window=3, segment=4, max_groups=2).forward(batch().documents)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch().targets.flatten(), reduction="sum")
    assert loss.sum == pytest.approx(float(nats.detach()), rel=1e-4)
    assert abs(loss.sum - batch_loss(compressor, batch(), "pooled").sum) > 1e-3


def test_the_gradient_reaches_theta_alone(pair) -> None:
    compressor = pair().compressor
    batch_loss(compressor, batch(), "pooled").total.backward()
    assert {name.split(".")[-2] for name, p in compressor.named_parameters() if p.grad is not None} == {"theta"}


def test_a_recipe_trains_it(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    first = train(load_recipe(recipe_file, [*COMPRESSIVE, "running.steps=1", "running.validate_every=1"]), tmp_path / "first")
    last = train(load_recipe(recipe_file, [*COMPRESSIVE, "running.steps=20"]), tmp_path / "last")
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.95 * first.loss
    assert "loss/autoregressive/n12/r3/pooled" in (tmp_path / "last" / "validation.csv").read_text()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mixture.ratio={low: 2.5, mode: 2.5, high: 2.5}", "whole number"),
        ("mixture.question=1.0", "one objective"),
        ("selection.warm_start=3", "no scorer"),
        ("selection.cost_start=3", "no scorer"),
        ("selection.asked_start=3", "no scorer"),
        ("model=averaging", "none of dodo, compressive"),
    ],
)
def test_what_it_can_not_be_is_refused(recipe_file: Path, setting: str, message: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_file, [*COMPRESSIVE, setting])
