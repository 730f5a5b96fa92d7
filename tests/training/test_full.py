"""Training of the baseline that reads the whole text."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dodo.data.batches import Batch, TextSource
from dodo.data.shards import Ragged, Shard
from dodo.errors import InputError
from dodo.training.mixture import BatchMaker
from dodo.training.objectives import batch_loss
from dodo.training.recipe import load_recipe
from dodo.training.run import train
from tests.conftest import stir, tokens
from tests.training.test_training import recipe_file  # noqa: F401 (a fixture)

RECIPES = Path(__file__).parents[2] / "recipes"
WHOLE = ["model=full", "mixture.autoencoding=0.0", "mixture.ratio={low: 1.0, mode: 1.0, high: 1.0}"]


def batch() -> Batch:
    """Two documents of 9 and 5 tokens, the second with two questions."""
    documents, decoder = tokens(2, 9), tokens(3, 6, seed=5)
    real, decoder_real = torch.ones(2, 9).bool(), torch.ones(3, 6).bool()
    real[1, 5:], decoder_real[0, 4:] = False, False
    targets = torch.where(decoder_real, tokens(3, 6, seed=6), -100)
    targets[:, :2] = -100
    return Batch("question", 1.0, documents, real, decoder, decoder_real, targets, rows=torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral, sliding", "phi3, longrope"])
def test_the_loss_is_that_of_theta_after_each_documents_own_tokens(family: str, pair) -> None:
    compressor = stir(pair(family).compressor)
    asked = batch()
    nats = []
    for i, row in enumerate((0, 1, 1)):
        document = asked.documents[row, asked.document_mask[row]]
        decoder = asked.decoder[i, asked.decoder_mask[i]]
        with torch.no_grad(), compressor.adapters.use("theta"):
            logits = compressor.base(torch.cat([document, decoder])[None]).logits[0, len(document) :]
        wanted = asked.targets[i, asked.decoder_mask[i]]
        nats.append(float(torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")))
    loss = batch_loss(compressor, asked, "whole")
    assert loss.tokens == 2 + 4 + 4
    assert loss.sum == pytest.approx(sum(nats), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_the_teacher_of_distillation_says_depends_on_no_padding(family: str, pair) -> None:
    compressor = stir(pair(family).compressor)
    asked = dataclasses.replace(batch(), objective="distillation", rows=None, documents=tokens(3, 9, seed=4))
    asked = dataclasses.replace(asked, document_mask=torch.ones(3, 9, dtype=torch.bool))
    asked.document_mask[1, 6:] = False
    other = asked.documents.clone()
    other[1, 6:] = 90
    losses = [batch_loss(compressor, one).sum for one in (asked, dataclasses.replace(asked, documents=other))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_gradient_reaches_theta_alone(pair) -> None:
    compressor = pair().compressor
    batch_loss(compressor, batch(), "whole").total.backward()
    assert {name.split(".")[-2] for name, p in compressor.named_parameters() if p.grad is not None} == {"theta"}


def test_as_a_language_model_all_tokens_are_read_by_theta(pair) -> None:
    """The first as well; nothing is scored, kept or dropped, as where it is measured (Section 5, Full)."""
    compressor = stir(pair().compressor)
    documents, targets = tokens(2, 12), tokens(2, 12, seed=1)
    real = torch.ones_like(documents).bool()
    nothing = documents[:, :0]
    read_on = Batch("autoregressive", 1.0, documents, real, nothing, nothing.bool(), targets, window=3, segment=2)
    loss = batch_loss(compressor, read_on, "whole")
    with torch.no_grad(), compressor.adapters.use("theta"):
        logits = compressor.base(documents).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.sum == pytest.approx(float(wanted), rel=1e-5)
    loss.total.backward()
    assert {name.split(".")[-2] for name, p in compressor.named_parameters() if p.grad is not None} == {"theta"}


def test_the_language_models_of_table_1_learn_from_the_same_batches() -> None:
    """In all parts of the training: the paper trains all of them on the same data."""
    ids = np.random.default_rng(0).integers(2, 999, 40_000).astype(np.uint16)
    text = TextSource([Shard("text", Ragged(ids, np.arange(0, 40_001, 2000)))], bos=0, eos=1)
    for part in ("", "-more", "-third", "-fourth"):
        seen = []
        names = {f"{kind}{part}": kind for kind in ("autoregressive", "compressive", "full")}
        in_its_place = ("autoregressive-from-full", "autoregressive-held") if part == "-third" else ()
        names |= dict.fromkeys(in_its_place, "autoregressive")
        for name, kind in names.items():
            recipe = load_recipe(RECIPES / f"smollm2-135m-{name}.yaml")
            seen.append([BatchMaker(recipe, text, None)(number) for number in range(6)])
            assert recipe.trained_as == kind
        for ours, *others in zip(*seen, strict=True):
            assert all(torch.equal(ours.documents, other.documents) for other in others)


def test_a_recipe_trains_it_on_questions_and_on_continuations(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    one = {"question": "Who?", "answers": ["the dodo"], "license": "CC0"}
    pairs = [{"context": f"{letter} dodo was a bird.", **one} for letter in "ABCDEFGH"]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    asked = [*WHOLE, "mixture.question=1.0", f"data.questions={tmp_path / 'questions.jsonl'}", "data.validation=[]"]
    continued = [*WHOLE, "mixture.continuation=1.0", "mixture.context={low: 8, mode: 8, high: 8}", "mixture.following=4"]
    for name, settings in (("question", asked), ("continuation", continued)):
        train(load_recipe(recipe_file, [*settings, "running.steps=20"]), tmp_path / name, progress=False)
        rows = [line.split(",") for line in (tmp_path / name / "train.csv").read_text().splitlines()]
        first, last = (float(value) for _, what, value in rows if what == f"loss/{name}")
        assert last < 0.9 * first
    assert "loss/continuation/n12/r3/whole" in (tmp_path / "continuation" / "validation.csv").read_text()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mixture.ratio={low: 1.0, mode: 2.0, high: 3.0}", "reads the whole text"),
        ("mixture.question_ratio={low: 1.0, mode: 2.0, high: 3.0}", "reads the whole text"),
        ("mixture.autoencoding=1.0", "can learn question, continuation, autoregressive"),
        ("selection.warm_start=3", "selects nothing"),
    ],
)
def test_what_it_can_not_be_is_refused(recipe_file: Path, setting: str, message: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_file, [*WHOLE, "mixture.question=1.0", setting])
