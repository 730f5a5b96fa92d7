"""Training of the baseline that averages."""

from pathlib import Path

import pytest
import torch

from dodo.compressive import Compressive
from dodo.data.batches import Batch
from dodo.errors import InputError
from dodo.training.pooling import compressive_loss, validate_compressive
from dodo.training.recipe import Pooling, load_recipe
from dodo.training.run import train
from tests.conftest import stir, tokens
from tests.training.test_training import recipe_file  # noqa: F401 (a fixture)

SETTINGS = Pooling(windows=(3, 5), segment=4)
COMPRESSIVE = ["model=compressive", "mixture.ratio={low: 3.0, mode: 3.0, high: 3.0}", "pooling={windows: [3], segment: 2}"]


def batch(number: int = 0) -> Batch:
    ids = tokens(3, 24)
    real = torch.ones_like(ids, dtype=torch.bool)
    return Batch("autoencoding", 3.0, ids, real, ids, real, ids, number=number)


def test_the_loss_is_that_of_every_token_after_the_first(pair) -> None:
    compressor = stir(pair().compressor)
    for number, window in enumerate((3, 5, 3)):
        loss = compressive_loss(compressor, batch(number), SETTINGS)
        logits = Compressive(compressor, ratio=3, window=window, segment=4).forward(batch().documents)[:, :-1]
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch().documents[:, 1:].flatten(), reduction="sum")
        assert loss.tokens == 3 * 23
        assert loss.sum == pytest.approx(float(nats.detach()), rel=1e-4)
        assert float(loss.total.detach()) == pytest.approx(loss.sum / loss.tokens, rel=1e-5)


def test_the_gradient_reaches_theta_alone(pair) -> None:
    compressor = pair().compressor
    compressive_loss(compressor, batch(), SETTINGS).total.backward()
    assert {name.split(".")[-2] for name, p in compressor.named_parameters() if p.grad is not None} == {"theta"}


def test_validation_has_each_window(pair) -> None:
    found = validate_compressive(pair().compressor, {"n24/r3": batch()}, SETTINGS)
    assert {"loss", "loss/n24/r3/tau3", "loss/n24/r3/tau5", "accuracy/n24/r3/tau3"} <= set(found)
    assert found["loss"] == pytest.approx((found["loss/n24/r3/tau3"] + found["loss/n24/r3/tau5"]) / 2)


def test_a_recipe_trains_it(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    first = train(load_recipe(recipe_file, [*COMPRESSIVE, "running.steps=1", "running.validate_every=1"]), tmp_path / "first")
    last = train(load_recipe(recipe_file, [*COMPRESSIVE, "running.steps=20"]), tmp_path / "last")
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.95 * first.loss


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mixture.ratio={low: 2.5, mode: 2.5, high: 2.5}", "whole number"),
        ("mixture.question=1.0", "no scorer and no questions"),
        ("pooling={windows: []}", "there must be a window"),
        ("model=averaging", "none of dodo, compressive"),
    ],
)
def test_what_it_can_not_be_is_refused(recipe_file: Path, setting: str, message: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_file, [*COMPRESSIVE, setting])
