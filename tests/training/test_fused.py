"""The fused arithmetic gives the numbers of the plain one."""

import torch
from torch.testing import assert_close

from dodo.config import LoraSettings
from dodo.training.fused import fused_lora, linear_cross_entropy
from tests.conftest import stir, tokens

EVERYWHERE = LoraSettings(rank=2, alpha=4, targets="all-linear")


def test_fused_lora_has_the_outputs_and_gradients_of_peft(pair):
    compressor = stir(pair(attention="eager", encoder=EVERYWHERE, decoder=EVERYWHERE).compressor)
    ids = tokens(2, 12)

    def gradients():
        nuggets = compressor.encode(ids, ratio=3)
        loss = compressor.decode(nuggets, ids, soft_token=True).square().mean()
        loss.backward()
        found = [p.grad.clone() for p in compressor.parameters() if p.grad is not None]
        compressor.zero_grad()
        return loss.detach(), found

    plain = gradients()
    with fused_lora(compressor.base):
        fused = gradients()
    assert len(plain[1]) > 10
    assert_close(fused, plain, rtol=1e-4, atol=1e-7)


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
