"""The fused arithmetic gives the numbers of the plain one."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dodo.config import LoraSettings
from dodo.training import fused
from dodo.training.fused import fused_lora, linear_cross_entropy
from tests.conftest import stir, tokens

EVERYWHERE = LoraSettings(rank=2, alpha=4, targets="all-linear")


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "eager"),
        ("llama", "sdpa"),
        ("llama, multi-query", "sdpa"),
        ("mistral, sliding", "eager"),
        ("mistral, sliding", "sdpa"),
        ("phi3, sliding, partial rotation", "sdpa"),
        ("qwen3", "sdpa"),
        ("gemma2", "eager"),
        ("gemma3", "sdpa"),
    ],
)
@pytest.mark.parametrize(("block", "kept"), [(20, 0), (20, 2**20), (512, 2**20)])
def test_fused_arithmetic_has_the_outputs_and_gradients_of_the_plain_one(pair, monkeypatch, family, attention, block, kept):
    monkeypatch.setattr(fused._Attention, "BLOCK_BYTES", block)
    monkeypatch.setattr(fused._Attention, "KEPT_BYTES", kept)
    compressor = stir(pair(family, attention=attention, encoder=EVERYWHERE, decoder=EVERYWHERE).compressor)
    ids = tokens(2, 12)
    real = torch.ones_like(ids)
    real[1, 9:] = 0

    def gradients():
        nuggets = compressor.encode(ids, real, ratio=3)
        logits = compressor.decode(nuggets, ids, real, soft_token=True)
        loss = torch.cat([logits[0], logits[1, :10]]).square().mean()
        loss.backward()
        found = {name: p.grad.clone() for name, p in compressor.named_parameters() if p.grad is not None}
        compressor.zero_grad()
        return loss.detach(), found

    plain = gradients()
    with fused_lora(compressor.base):
        quick = gradients()
    assert len(plain[1]) > 10 and "scorer.output.weight" in plain[1]
    assert_close(quick, plain, rtol=1e-3, atol=1e-6)


def test_without_gradients_fused_arithmetic_has_the_outputs_of_the_plain_one(pair):
    compressor = stir(pair(attention="sdpa").compressor)
    ids = tokens(2, 12)
    with torch.no_grad():
        plain = compressor.decode(compressor.encode(ids, ratio=3), ids)
        with fused_lora(compressor.base):
            quick = compressor.decode(compressor.encode(ids, ratio=3), ids)
        after = compressor.decode(compressor.encode(ids, ratio=3), ids)
    assert_close(quick, plain, rtol=1e-4, atol=1e-5)
    assert_close(after, plain, rtol=0, atol=0)


def test_linear_cross_entropy_equals_the_one_over_whole_logits():
    torch.manual_seed(0)
    states = torch.randn(7, 8, requires_grad=True)
    weight, targets = torch.randn(30, 8), torch.randint(0, 30, (7,))
    weights = torch.rand(7)
    losses = torch.nn.functional.cross_entropy(states @ weight.T, targets, reduction="none")
    (expected,) = torch.autograd.grad((losses * weights).sum(), states)
    total, each, hits = linear_cross_entropy(states, weight, targets, weights, chunk=3)
    (found,) = torch.autograd.grad(total, states)
    assert_close(total, (losses * weights).sum())
    assert_close(each, losses.detach())
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert hits.tolist() == ((states @ weight.T).argmax(-1) == targets).tolist()


def test_linear_cross_entropy_multiplies_for_the_gradient_only_where_there_is_one():
    states, weight, targets = torch.randn(7, 8, requires_grad=True), torch.randn(30, 8), torch.randint(0, 30, (7,))

    def measured(states):
        with FlopCounterMode(display=False) as counter:
            found = linear_cross_entropy(states, weight, targets, torch.ones(7), chunk=3)
        return counter.get_total_flops(), [tensor.detach() for tensor in found]

    flops, found = measured(states)
    with torch.no_grad():
        fewer, same = measured(states)
    assert (fewer, flops) == (2 * 7 * 8 * 30, 4 * 7 * 8 * 30)
    assert_close(same, found, rtol=0, atol=0)
    assert measured(states.detach())[0] == fewer
