"""Where gradients go, and that how a batch is cut up or recomputed does not change them."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dodo.compressor import Compressor
from dodo.config import LoraSettings
from dodo.data.batches import Batch
from dodo.nuggets import Nuggets
from dodo.selection import stride
from dodo.training.fused import fused_lora
from dodo.training.objectives import batch_loss, encode
from tests.conftest import stir, tokens

EVERYWHERE = LoraSettings(rank=2, alpha=4, targets="all-linear")


@pytest.fixture
def compressor(pair) -> Compressor:
    return stir(pair(attention="eager", encoder=EVERYWHERE, decoder=EVERYWHERE, keep_first=True).compressor)


def autoencoding(rows: int = 4, length: int = 12) -> Batch:
    ids = tokens(rows, length)
    real = torch.ones_like(ids, dtype=torch.bool)
    targets = torch.cat([ids, torch.full((rows, 1), 2)], dim=1)
    return Batch("autoencoding", 3.0, ids, real, ids, real, targets)


def rows_of(batch: Batch, rows: slice) -> Batch:
    cut = {name: value[rows] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **cut)


def gradients(compressor: Compressor) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in compressor.named_parameters() if p.grad is not None}
    compressor.zero_grad(set_to_none=True)
    return found


def test_accumulated_halves_give_the_gradient_of_the_whole(compressor):
    batch = autoencoding()
    batch_loss(compressor, batch).total.backward()
    whole = gradients(compressor)
    divisor = int((batch.targets != -100).sum())
    for half in (slice(0, 2), slice(2, 4)):
        batch_loss(compressor, rows_of(batch, half), divisor=divisor).total.backward()
    assert_close(gradients(compressor), whole, rtol=1e-4, atol=1e-6)


def test_recomputing_layers_gives_the_same_gradients(compressor):
    batch = autoencoding()
    compressor.train()
    with fused_lora(compressor.base):
        batch_loss(compressor, batch).total.backward()
        plain = gradients(compressor)
        compressor.adapters.checkpoint_gradients()
        batch_loss(compressor, batch).total.backward()
    assert_close(gradients(compressor), plain, rtol=1e-4, atol=1e-6)


def test_one_step_changes_both_adapters_scorer_and_soft_token_and_not_the_base(compressor):
    before = {name: p.detach().clone() for name, p in compressor.named_parameters()}
    optimizer = torch.optim.SGD([p for p in compressor.parameters() if p.requires_grad], lr=1.0)
    batch_loss(compressor, autoencoding()).total.backward()
    optimizer.step()
    changed = {name for name, p in compressor.named_parameters() if not torch.equal(p, before[name])}
    assert any(".phi." in name for name in changed)
    assert any(".theta." in name for name in changed)
    assert "soft_token" in changed
    assert any(name.startswith("scorer") for name in changed)
    assert all(".lora_" in name or name == "soft_token" or name.startswith("scorer") for name in changed)


def test_prompts_do_not_enter_the_loss(compressor):
    batch = autoencoding(rows=2)
    targets = torch.full((2, 12), -100)
    targets[:, 8:] = 5
    question = dataclasses.replace(batch, objective="question", targets=targets)
    loss = batch_loss(compressor, question)
    assert loss.tokens == 8
    logits = compressor.decode(encode(compressor, question), question.decoder)[:, 8:].float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 8:].flatten(), reduction="sum")
    assert loss.sum == pytest.approx(float(expected.detach()), rel=1e-4)


def test_rows_for_several_questions_are_their_texts(compressor):
    real = torch.arange(12) < torch.tensor([[1], [12], [7]])
    nuggets = compressor.encode(tokens(3, 12), real, ratio=3)
    picked, expected = nuggets.rows(torch.tensor([1, 0, 1, 2])), Nuggets.stack([nuggets[i] for i in (1, 0, 1, 2)])
    for name, want in vars(expected).items():
        if isinstance(want, Tensor):
            assert_close(getattr(picked, name), want)


def test_distilling_to_oneself_at_ratio_one_costs_nothing(pair):
    compressor = pair(attention="eager").compressor  # fresh adapters change nothing
    ids = tokens(2, 16)
    real = torch.ones(2, 10, dtype=torch.bool)
    batch = Batch("distillation", 1.0, ids[:, :10], real, ids[:, 10:15], real[:, :5], ids[:, 11:])
    loss = batch_loss(compressor, batch, kl_weights=(1.0, 1.0))
    assert loss.sum == pytest.approx(0, abs=1e-4)


def test_the_scorer_gets_a_gradient_however_tokens_are_selected(compressor):
    for way in ("scorer", "stride"):
        batch_loss(compressor, autoencoding(), way).total.backward()
        assert float(gradients(compressor)["scorer.output.weight"].norm()) > 0, way


def test_a_stride_takes_the_last_token_of_each_block():
    mask = torch.tensor([[True] * 13, [True] * 9 + [False] * 4])
    by = stride(mask, ratio=4, keep_first=True)
    chosen = [sorted(row.topk(k).indices.tolist()) for row, k in zip(by, (3, 2), strict=True)]
    assert chosen == [[4, 8, 12], [4, 8]]
