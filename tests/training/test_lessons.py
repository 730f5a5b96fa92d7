"""What the scorer is taught before the first step."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dodo.compressor import Compressor
from dodo.coverage import TEMPER
from dodo.data.batches import Batch, QuestionSource
from dodo.data.shards import prepare
from dodo.errors import InputError
from dodo.training.lessons import answers_in, cost_of_loss, learn_asked, learn_cost, learn_surprisal, surprisal, surprisal_loss
from dodo.training.recipe import load_recipe
from dodo.training.run import load_for_training, train
from tests.conftest import stir, tokens
from tests.standins.models import byte_tokenizer
from tests.training.test_training import recipe_file  # noqa: F401


@pytest.fixture
def compressor(pair) -> Compressor:
    return pair().compressor


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_surprisal_is_the_bases_own_whatever_the_adapters(pair, family):
    compressor = pair(family).compressor
    ids = tokens(2, 300)
    with torch.no_grad(), compressor.adapters.use(None):
        log_p = compressor.base(input_ids=ids).logits.float().log_softmax(-1)
    expected = -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(surprisal(compressor, ids), expected, atol=1e-4, rtol=1e-4)
    with compressor.adapters.use("phi"):
        torch.testing.assert_close(surprisal(compressor, ids), expected, atol=1e-4, rtol=1e-4)


def test_the_scorer_learns_surprisal_and_nothing_else_changes(compressor):
    ids = tokens(4, 40)
    real = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch("autoencoding", 1.0, ids, real, ids, real, ids)
    others = {name: p.detach().clone() for name, p in compressor.named_parameters() if not name.startswith("scorer")}
    before = float(surprisal_loss(compressor, ids).detach())
    after = learn_surprisal(compressor, [batch] * 60, lr=1e-2)
    wanted = surprisal(compressor, ids)
    mean = float(wanted.mean())
    constant = mean - mean * torch.tensor(mean).log().item()  # the best that one value for all tokens can do
    assert after < constant < before
    assert all(torch.equal(p, others[name]) for name, p in compressor.named_parameters() if name in others)
    assert all(p.grad is None for name, p in compressor.named_parameters() if name in others)


def test_where_questions_have_a_score_both_learn_surprisal(pair):
    compressor = pair(scores_by_use=True).compressor
    ids = tokens(4, 40)
    real = torch.ones_like(ids, dtype=torch.bool)
    learn_surprisal(compressor, [Batch("autoencoding", 1.0, ids, real, ids, real, ids)] * 200, lr=1e-2)
    wanted = surprisal(compressor, ids)
    mean = float(wanted.mean())
    constant = mean - mean * math.log(mean)
    for use in ("text", "questions"):
        scores = compressor.score(ids, use)[:, 1:].detach()
        assert float((scores.exp() - wanted * scores).mean()) < constant, use


@pytest.mark.parametrize("score", [3.0, 6.0, 200.0])
def test_scores_far_above_any_surprisal_come_down(compressor, score):
    torch.nn.init.constant_(compressor.scorer.output.bias, score)
    torch.nn.init.zeros_(compressor.scorer.output.weight)
    loss = surprisal_loss(compressor, tokens(2, 20) % 90)
    (gradient,) = torch.autograd.grad(loss, compressor.scorer.output.bias)
    assert 0 < float(gradient) < math.exp(4)


QUESTIONS = [
    {"context": "In 1662 a crew saw one; in 1662 no more.", "question": "When?", "answers": ["1662"]},
    {"context": "In 1662 a crew saw one; in 1662 no more.", "question": "Who?", "answers": ["a crew"]},
    {"context": "Nobody has seen one since, in all of my years.", "question": "Who?", "answers": ["nobody"]},
]


def questions(folder: Path) -> QuestionSource:
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    tokenizer = byte_tokenizer()
    shard = prepare([str(folder / "questions.jsonl")], folder / "questions.safetensors", tokenizer, kind="question")
    return QuestionSource(shard, bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id)


def test_answers_are_found_in_their_own_documents_wherever_they_stand(tmp_path):
    source = questions(tmp_path)
    assert source.most == 2
    batch = source.batch(200, source.most, 1.0, np.random.default_rng(0), at=0)
    found = answers_in(byte_tokenizer(), batch)
    marked = {}
    for row, real, places in zip(batch.documents, batch.document_mask, found, strict=True):
        text = byte_tokenizer().decode(row[real][1:])
        shown = "".join(letter if place else "." for letter, place in zip(text, places[real][1:].tolist(), strict=True))
        marked[text] = shown
        assert not places[0]  # BOS
        assert not places[~real].any()
    assert marked == {
        "In 1662 a crew saw one; in 1662 no more.": "...1662.a crew.............1662.........",
        "Nobody has seen one since, in all of my years.": "." * 46,  # "nobody" is not there word for word
    }


def test_documents_that_do_not_come_back_the_same_have_no_answers(tmp_path):
    batch = questions(tmp_path).batch(40, 2, 1.0, np.random.default_rng(0), at=0)
    assert answers_in(byte_tokenizer(), batch).any()
    letter = batch.documents.clone()
    letter[0, 1] = letter[0, 1:].max() + 40  # a byte that is no letter of its own: it is decoded to the replacement character
    assert not answers_in(byte_tokenizer(), dataclasses.replace(batch, documents=letter)).any()
    with pytest.raises(InputError, match="a fast tokenizer is needed"):
        answers_in(SimpleNamespace(is_fast=False), batch)  # type: ignore[arg-type]


def halves(tokenizer) -> Batch:
    """Two kinds of tokens stand anywhere; one is the answer in half of the documents, the other never."""
    letters = np.random.default_rng(0).choice(list("abcdefg"), (8, 40))
    letters[:, 5::10], letters[:, 7::10] = "X", "Y"
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(row) for row in letters.tolist()])
    real = torch.ones_like(ids, dtype=torch.bool)
    targets = torch.full((8, 3), -100)
    for row in range(8):
        targets[row, :2] = torch.tensor([*tokenizer.convert_tokens_to_ids(["X" if row % 2 else "Z"]), tokenizer.eos_token_id])
    batch = Batch("question", 1.0, ids, real, ids[:, :3], real[:, :3], targets)
    assert answers_in(tokenizer, batch).sum() == 4 * 4
    return batch


def test_the_scorer_learns_what_is_asked_for_beside_what_it_knew(compressor):
    tokenizer = byte_tokenizer()
    batch = halves(tokenizer)
    ids = batch.documents
    before = (TEMPER * compressor.score(ids).detach()).exp()
    others = {name: p.detach().clone() for name, p in compressor.named_parameters() if not name.startswith("scorer")}
    learn_asked(compressor, tokenizer, [batch] * 150, asked=6.0, lr=1e-2)
    after = (TEMPER * compressor.score(ids).detach()).exp()
    assert float(after[:, 5::10].mean() - before[:, 5::10].mean()) == pytest.approx(3.0, abs=0.6)  # half of 6
    assert float(after[:, 7::10].mean()) == pytest.approx(float(before[:, 7::10].mean()), rel=0.3)
    assert all(torch.equal(p, others[name]) for name, p in compressor.named_parameters() if name in others)


def test_questions_learn_a_score_of_their_own_and_the_texts_stays(pair):
    """The answer's token costs 1 + 6 / 2 times as much in questions, and as much as before in the text."""
    compressor, tokenizer = pair(scores_by_use=True).compressor, byte_tokenizer()
    with torch.no_grad():
        compressor.scorer.output.bias.copy_(torch.tensor([2.0, -3.0]))
    batch = halves(tokenizer)
    text = (TEMPER * compressor.score(batch.documents).detach()).exp()
    learn_asked(compressor, tokenizer, [batch] * 200, asked=6.0, lr=1e-2)
    after = {use: (TEMPER * compressor.score(batch.documents, use).detach()).exp() for use in ("text", "questions")}
    torch.testing.assert_close(after["text"].mean(0), text.mean(0), rtol=0.3, atol=0.3)
    times = after["questions"] / text
    assert float(times[:, 5::10].mean()) == pytest.approx(4.0, rel=0.15)
    assert float(times[:, 7::10].mean()) == pytest.approx(1.0, rel=0.15)


def rebuilt(compressor: Compressor, ids: torch.Tensor) -> Batch:
    """Texts to be rebuilt, a BOS token in front of each."""
    real = torch.ones_like(ids, dtype=torch.bool)
    targets = torch.cat([ids[:, 1:], torch.full((len(ids), 1), 2)], dim=1)
    return Batch("autoencoding", 1.0, ids, real, ids[:, 1:], real[:, 1:], targets)


def test_what_a_lost_token_costs_is_the_loss_of_rebuilding_it(pair):
    compressor = stir(pair(selection="coverage", reach=6.0, keep_first=True).compressor)
    ids = tokens(3, 50)
    batch = rebuilt(compressor, ids)
    losses, shares = cost_of_loss(compressor, batch, np.random.default_rng(5))
    assert losses.shape == shares.shape == (3, 50)
    assert not losses[:, 0].any()
    assert not shares[:, 0].any()  # the first token is not rebuilt

    rng = np.random.default_rng(5)
    at_random = torch.from_numpy(rng.random((3, 50)))
    ratio = float(rng.uniform(1, 2)) * 6
    with torch.no_grad():
        nuggets = compressor.encode(ids, ratio=ratio, select_by=at_random)
        assert 49 / 12 <= int(nuggets.k[0]) <= 49 / 6 + 1
        logits = compressor.decode(nuggets, batch.decoder, soft_token=True).log_softmax(-1)
    for row in range(3):
        places = nuggets.indices[row].tolist()
        for at in range(1, 50):
            assert float(losses[row, at]) == pytest.approx(-float(logits[row, at - 1, ids[row, at]]), abs=1e-3)
            distance = min(place for place in places if place >= at) - at
            share = 0.05 + 0.95 / (1 + math.exp((6 - distance) / 0.8)) if distance else 0.0
            assert float(shares[row, at]) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("by_use", [False, True])
def test_the_scorer_learns_what_losing_a_token_costs_and_nothing_else_changes(pair, monkeypatch, by_use):
    """Losses are made up: 6 nats of one kind of tokens, 2 of the others, times the share to which they are lost."""
    compressor = pair(scores_by_use=by_use).compressor
    ids = halves(byte_tokenizer()).documents
    costs = torch.full(ids.shape, 2.0)
    costs[:, 5::10] = 6.0

    def made_up(compressor: Compressor, batch: Batch, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        shares = torch.from_numpy(rng.random(ids.shape)).float()
        return shares * costs, shares

    monkeypatch.setattr("dodo.training.lessons.cost_of_loss", made_up)
    others = {name: p.detach().clone() for name, p in compressor.named_parameters() if not name.startswith("scorer")}
    learn_cost(compressor, [rebuilt(compressor, ids)] * 200, lr=1e-2)
    for use in ("text", "questions"):
        learned = (TEMPER * compressor.score(ids, use).detach()).exp()
        assert float(learned[costs == 6].mean()) == pytest.approx(6, rel=0.15)
        assert float(learned[costs == 2].mean()) == pytest.approx(2, rel=0.15)
    assert all(torch.equal(p, others[name]) for name, p in compressor.named_parameters() if name in others)


def test_a_run_teaches_its_scorer_first(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    settings = ["mixture.question=1.0", f"data.questions={tmp_path / 'questions.jsonl'}", "running.steps=1"]
    settings += ["optimizer.scorer_lr=0.0"]
    taught = load_recipe(recipe_file, [*settings, "selection.asked_start=20"])
    fresh = load_for_training(taught).compressor.scorer.output.weight
    for recipe, same in ((load_recipe(recipe_file, settings), True), (taught, False)):
        train(recipe, tmp_path / str(same), progress=False)
        after = load_for_training(dataclasses.replace(taught, start=str(tmp_path / str(same) / "last"))).compressor.scorer
        assert torch.allclose(fresh, after.output.weight, atol=1e-4) is same  # saved in fp16
    with pytest.raises(InputError, match=r"selection.asked_start reads questions, but the mixture has none"):
        train(load_recipe(recipe_file, ["selection.asked_start=3"]), tmp_path / "none", progress=False)
    with pytest.raises(InputError, match=r"selection.cost_start reads plain text, but no objective of the mixture does"):
        alone = [*settings, "mixture.autoencoding=0", "selection.cost_start=3"]
        train(load_recipe(recipe_file, alone), tmp_path / "alone", progress=False)
    costly = load_recipe(recipe_file, [*settings, "selection.cost_start=20"])
    train(costly, tmp_path / "costly", progress=False)
    after = load_for_training(dataclasses.replace(costly, start=str(tmp_path / "costly" / "last"))).compressor.scorer
    assert not torch.allclose(fresh, after.output.weight, atol=1e-4)
    with pytest.raises(InputError, match=r"selection.asked is above 0, not 0"):
        load_recipe(recipe_file, ["selection.asked=0.0"])
