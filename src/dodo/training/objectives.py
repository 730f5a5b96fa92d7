"""What is minimised: the decoder's loss given nuggets, for each kind of batch.

Paper: Section 2.2 (Eq. 11, the autoregressive LM), Section 2.4 (Eq. 17, 18 through `Compressor.decode`), Section 4 (autoencoding
with the soft token), Section 6 (continuation; fine-tuning on document, question, answer). Recall, and distillation to the same
base reading everything, are beyond the paper.

Shapes: B texts, T document tokens, M decoder tokens, N tokens with a loss, V vocabulary, D width.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dodo.adapters import THETA, AdapterName
from dodo.architecture import backbone, layer_windows, logits_of
from dodo.attention import attention_masks
from dodo.autoregressive import Autoregressive
from dodo.compressive import Compressive
from dodo.compressor import Compressor
from dodo.config import Use
from dodo.data.batches import Batch
from dodo.icae import Icae, Memory
from dodo.nuggets import Nuggets
from dodo.selection import every, stride
from dodo.training.fused import linear_cross_entropy

__all__ = ["Loss", "Way", "batch_loss", "encode", "remember"]

Way = Literal["scorer", "stride", "pooled", "memory", "whole"]
"""How tokens are selected: as the configuration says; by a fixed stride, the control that a learned selection must beat; or not
at all, where the past of an autoregressive LM is averaged (`Compressive`), memory tokens hold the text (`Icae`), or theta reads
the whole of it (Full, fine-tuned)."""


@dataclass(frozen=True)
class Loss:
    """Of one batch.

    total: fp32 scalar with gradient, the sum over tokens divided by `divisor`. tokens: N. sum: of -log p. correct: how many
    targets had the highest logit.
    """

    total: Tensor
    tokens: int
    sum: float
    correct: int


def encode(compressor: Compressor, batch: Batch, way: Way = "scorer") -> Nuggets:
    """Nuggets of the batch's documents, selected in the given way, repeated for each question."""
    by = None if way == "scorer" else stride(batch.document_mask, ratio=batch.ratio, keep_first=compressor.config.keep_first)
    use: Use = "questions" if batch.objective == "question" else "text"
    nuggets = compressor.encode(batch.documents, batch.document_mask, ratio=batch.ratio, use=use, select_by=by)
    return nuggets if batch.rows is None else nuggets.rows(batch.rows)


def remember(compressor: Compressor, batch: Batch) -> Memory:
    """The batch's documents as ICAE holds them, repeated for each question."""
    icae = Icae(compressor)
    slots = icae.slots(batch.document_mask, ratio=batch.ratio)
    memory = icae.encode(batch.documents, batch.document_mask, slots=slots)
    return memory if batch.rows is None else Memory(memory.states[batch.rows], memory.counts[batch.rows])


def batch_loss(
    compressor: Compressor,
    batch: Batch,
    way: Way = "scorer",
    *,
    divisor: float | None = None,
    kl_weights: tuple[float, float] = (1.0, 0.0),
) -> Loss:
    """Loss of one batch.

    Args:
        compressor: in training, with gradients.
        batch: see `Batch`.
        way: how tokens are selected.
        divisor: what the sum over tokens is divided by; None: the batch's own tokens (a mean).
        kl_weights: of forward and reverse KL, for distillation.
    """
    soft = batch.objective == "autoencoding"
    if batch.objective == "autoregressive":
        states = _read_on(compressor, batch, way)
    elif way == "whole":
        states = _read_whole(compressor, batch, THETA)
    elif way == "memory":
        memory = remember(compressor, batch)
        states = Icae(compressor).decode(memory, batch.decoder, batch.decoder_mask, soft_token=soft)
    else:
        nuggets = encode(compressor, batch, way)
        states = compressor.decode(nuggets, batch.decoder, batch.decoder_mask, soft_token=soft, states=True)
    counted = batch.targets != -100  # [B, M (+ 1)]
    targets_N = batch.targets[counted]
    states_ND = states[counted]
    divisor = divisor or max(1, len(targets_N))
    if batch.objective == "distillation":
        return _distilled(compressor, batch, states_ND, targets_N, counted, divisor, kl_weights)
    if not _plain_head(compressor):
        logits = logits_of(compressor.base, states_ND)
        losses = torch.nn.functional.cross_entropy(logits, targets_N, reduction="none")
        correct = int((logits.argmax(-1) == targets_N).sum())
        return Loss(losses.sum() / divisor, len(targets_N), float(losses.detach().sum()), correct)
    head = compressor.base.get_output_embeddings().weight
    weights = torch.full((len(targets_N),), 1.0 / divisor, device=states.device)
    total, losses, hits = linear_cross_entropy(states_ND, head, targets_N, weights)
    return Loss(total, len(targets_N), float(losses.sum()), int(hits.sum()))


def _read_whole(compressor: Compressor, batch: Batch, adapter: AdapterName | None) -> Tensor:
    """States [B, M, D] of the decoder's tokens by an adapter, or the base, behind the whole document. Paper: Section 6 (Full)."""
    rows = slice(None) if batch.rows is None else batch.rows
    ids = torch.cat([batch.documents[rows], batch.decoder], dim=1)
    mask = torch.cat([batch.document_mask[rows], batch.decoder_mask], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # documents are padded on the right, between them and what follows
    masks: Any = mask
    if any(layer_windows(compressor.base.config)):  # transformers would count the padding too
        masks = attention_masks(compressor.base, query_positions=positions, key_positions=positions, key_mask=mask.bool())
    with compressor.adapters.use(adapter):
        base = backbone(compressor.base)
        states = base(input_ids=ids, attention_mask=masks, position_ids=positions, use_cache=False).last_hidden_state
    own: Tensor = states[:, batch.documents.shape[1] :]
    return own


def _read_on(compressor: Compressor, batch: Batch, way: Way) -> Tensor:
    """States [B, T, D] of the autoregressive LM. Its threshold is estimated anew from the scores of each batch."""
    if way == "pooled":
        r = round(batch.ratio)
        averaging = Compressive(compressor, r, window=batch.window, segment=batch.segment, max_groups=batch.nuggets)
        return averaging.forward(batch.documents, states=True)
    if way == "whole":
        with compressor.adapters.use(THETA):
            read: Any = backbone(compressor.base)(input_ids=batch.documents, use_cache=False)
        return cast(Tensor, read.last_hidden_state)
    most = None if batch.nuggets is None else batch.window + batch.segment + compressor.config.keep_first + batch.nuggets
    lm = Autoregressive(compressor, threshold=math.inf, window=batch.window, segment=batch.segment, max_states=most)
    scores = lm.score(batch.documents)
    if way == "stride":
        kept = every(torch.arange(scores.shape[1], device=scores.device), ratio=batch.ratio).expand(scores.shape)
    else:
        competing = scores.detach()[:, lm.keep_first :].flatten()
        k = min(len(competing), max(1, round(len(competing) / batch.ratio)))
        kept = scores >= competing.kthvalue(len(competing) - k + 1).values
    return lm.forward(batch.documents, scores=scores, kept=kept, states=True)


def _plain_head(compressor: Compressor) -> bool:
    head = compressor.base.get_output_embeddings()
    capped = getattr(compressor.base.config, "final_logit_softcapping", None)
    return capped is None and head.weight.is_floating_point() and getattr(head, "bias", None) is None


def _distilled(
    compressor: Compressor,
    batch: Batch,
    states_ND: Tensor,
    targets_N: Tensor,
    counted: Tensor,
    divisor: float,
    kl_weights: tuple[float, float],
) -> Loss:
    """KL between the decoder and the base, adapters off, that reads document and continuation."""
    with torch.no_grad():
        taught = _read_whole(compressor, batch, None)
    teacher_NV = logits_of(compressor.base, taught[counted]).log_softmax(-1)
    student_NV = logits_of(compressor.base, states_ND).log_softmax(-1)
    forward = torch.nn.functional.kl_div(student_NV, teacher_NV, log_target=True, reduction="sum")
    reverse = torch.nn.functional.kl_div(teacher_NV, student_NV, log_target=True, reduction="sum")
    total = kl_weights[0] * forward + kl_weights[1] * reverse
    correct = int((student_NV.argmax(-1) == targets_N).sum())
    return Loss(total / divisor, len(targets_N), float(total.detach()), correct)
