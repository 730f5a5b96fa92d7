"""The scorer's warm start."""

import pytest
import torch

from dodo.compressor import Compressor
from dodo.data.batches import Batch
from dodo.training.surprisal import learn_surprisal, surprisal, surprisal_loss
from tests.conftest import tokens


@pytest.fixture
def compressor(pair) -> Compressor:
    return pair().compressor


def test_surprisal_is_the_bases_own_whatever_the_adapters(compressor):
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
