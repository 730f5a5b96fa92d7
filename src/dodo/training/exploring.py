"""How tokens are selected while the scorer learns: with noise, one per block, or by a fixed stride.

Paper: Eq. 5, 6 (stochastic selection). An untrained scorer clumps its picks, and what is never selected gets no gradient. A
random token of each block of r covers the text evenly, so at first tokens are selected so, and more and more by the scorer.
Each function returns values to select by; the straight-through term stays on the scorer's own scores.

Shapes: B texts, T tokens.
"""

import torch
from torch import Tensor

from dodo.selection import count_nuggets, prefer_blocks

__all__ = ["best_of_block", "noisy", "random_of_block", "stride"]


def noisy(scores: Tensor, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """scores + scale * Gumbel noise: top-k of it draws k tokens without replacement, in proportion to exp(score / scale)."""
    if scale == 0:
        return scores.detach()
    uniform = torch.rand(scores.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(scores.device)
    return scores.detach() - scale * torch.log(-torch.log(uniform))


def best_of_block(scores: Tensor, mask: Tensor, *, ratio: float, keep_first: bool) -> Tensor:
    """The best-scored token of each of k equal blocks of a text's tokens; in the last block, the last token.

    Args:
        scores: fp32 [B, T].
        mask: bool [B, T], real tokens, padding on the right.
        ratio: r.
        keep_first: the first token stands outside the blocks.
    """
    candidates = mask.clone()
    candidates[:, 0] &= ~((mask.sum(-1) > 1) & keep_first)
    k = torch.tensor([count_nuggets(n, ratio=ratio) for n in candidates.sum(-1).tolist()], device=scores.device)
    return prefer_blocks(scores, k, candidates)


def random_of_block(
    scores: Tensor, mask: Tensor, *, ratio: float, keep_first: bool, generator: torch.Generator | None = None
) -> Tensor:
    """A random token of each block."""
    noise = torch.rand(scores.shape, generator=generator).to(scores.device)
    return best_of_block(noise, mask, ratio=ratio, keep_first=keep_first)


def stride(scores: Tensor, mask: Tensor, *, ratio: float, keep_first: bool) -> Tensor:
    """The last token of each block: the control that a learned selection must beat."""
    place = torch.arange(scores.shape[1], device=scores.device).expand_as(scores) / scores.shape[1]
    return best_of_block(place, mask, ratio=ratio, keep_first=keep_first)
