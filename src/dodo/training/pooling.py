"""Training of the *Compressive* baseline: theta learns to write on over means of the past.

Paper: Section 5.1. The loss is that of every token after the first, Eq. 11 with means in place of nuggets; phi, scorer and soft
token get no gradient. A batch's documents are read as plain text, whatever else is in the batch.
"""

from collections.abc import Mapping

import torch

from dodo.compressive import Compressive
from dodo.compressor import Compressor
from dodo.data.batches import Batch
from dodo.training.objectives import Loss, token_loss
from dodo.training.recipe import Pooling

__all__ = ["compressive_loss", "validate_compressive"]


def compressive_loss(
    compressor: Compressor, batch: Batch, settings: Pooling, *, window: int | None = None, divisor: float | None = None
) -> Loss:
    """Loss of one batch.

    Args:
        compressor: in training, with gradients.
        batch: of documents without padding; its ratio is r.
        settings: windows and segment.
        window: tau; None: one of the settings' windows, in turn by the batch's number.
        divisor: what the sum over tokens is divided by; None: the batch's own tokens (a mean).
    """
    tau = window or settings.windows[batch.number % len(settings.windows)]
    lm = Compressive(compressor, ratio=int(batch.ratio), window=tau, segment=settings.segment)
    states = lm.forward(batch.documents, states=True)[:, :-1].flatten(0, 1)
    return token_loss(compressor, states, batch.documents[:, 1:].flatten(), divisor=divisor)


@torch.no_grad()
def validate_compressive(compressor: Compressor, batches: Mapping[str, Batch], settings: Pooling) -> dict[str, float]:
    """Loss (nats per token) and accuracy of each batch at each window: `loss/n512/r10/tau32`, `accuracy/...`; their mean."""
    found: dict[str, float] = {}
    for name, batch in batches.items():
        for window in settings.windows:
            loss = compressive_loss(compressor, batch, settings, window=window)
            found[f"loss/{name}/tau{window}"] = loss.sum / loss.tokens
            found[f"accuracy/{name}/tau{window}"] = loss.correct / loss.tokens
    losses = [value for key, value in found.items() if key.startswith("loss/")]
    return found | {"loss": sum(losses) / len(losses)}
