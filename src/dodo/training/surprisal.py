"""A start for the scorer: it learns how surprising each token is to the base.

Beyond the paper. What can't be guessed from the tokens before it must be in the nuggets, so there they should be dense; and an
untrained scorer's selection is worse than a fixed stride. Surprisal comes from the base itself, adapters off.

Shapes: B texts, T tokens.
"""

import torch
from torch import Tensor

from dodo.architecture import backbone
from dodo.compressor import Compressor
from dodo.data.batches import Batch

__all__ = ["learn_surprisal", "surprisal", "surprisal_loss"]

CHUNK = 256
LARGEST_SCORE = 4.0  # e^4 = 55 nats


@torch.no_grad()
def surprisal(compressor: Compressor, input_ids: Tensor) -> Tensor:
    """-log p(x_i | x_<i) of the base, in nats, for the tokens after the first.

    Args:
        input_ids: int64 [B, T], without padding.

    Returns:
        fp32 [B, T - 1].
    """
    head = compressor.base.get_output_embeddings()
    with compressor.adapters.use(None):
        states = backbone(compressor.base)(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    states_ND, targets_N = states.flatten(0, 1), input_ids[:, 1:].flatten()
    losses = [
        torch.nn.functional.cross_entropy(head(some).float(), wanted, reduction="none")
        for some, wanted in zip(states_ND.split(CHUNK), targets_N.split(CHUNK), strict=True)
    ]
    return torch.cat(losses).view(input_ids.shape[0], -1)


def surprisal_loss(compressor: Compressor, input_ids: Tensor) -> Tensor:
    """Poisson loss of exp(score) against the surprisal of each token; its gradient goes to the scorer alone."""
    wanted = surprisal(compressor, input_ids)
    scores = compressor.score(input_ids)[:, 1:]
    return (scores.clamp(max=LARGEST_SCORE).exp() - wanted * scores).mean()


def learn_surprisal(compressor: Compressor, batches: list[Batch], *, lr: float = 1e-3) -> float:
    """Fit the scorer to surprisal, one step per batch, the rate going linearly to zero.

    Args:
        batches: their documents are read, all of one length.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(compressor.scorer.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10) * (1 - step / len(batches))
        loss = surprisal_loss(compressor, batch.documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)
