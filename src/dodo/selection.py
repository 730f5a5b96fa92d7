"""How many nuggets, and which tokens: pure functions on scores and masks. `coverage` has one more way to choose them.

Paper: Section 2.3, Eq. 14 (top-k) with its footnote (the last token is always selected), and k = ceil(n / r).

Shapes: B batch, T tokens, K nuggets, H key/value heads, D head width.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from dodo.config import is_finite
from dodo.errors import InputError

__all__ = [
    "Selection",
    "count_nuggets",
    "every",
    "gather_tokens",
    "prefer_dense",
    "select_top_k",
    "stride",
]


@dataclass(frozen=True)
class Selection:
    """Selected tokens of a batch, ascending, padded on the right.

    indices: int64 [B, K], places of the selected tokens in their rows; 0 where `mask` is false.
    mask: bool [B, K], true for real selections.
    """

    indices: Tensor
    mask: Tensor


def count_nuggets(n: int, *, ratio: float | None = None, nuggets: int | None = None) -> int:
    """k for a text of n tokens, from a ratio (k = ceil(n / r)) or an absolute number.

    Paper: Section 2.3.

    Args:
        n: tokens that compete, at least 1.
        ratio: r, tokens per nugget, at least 1; where r > n, k is 1.
        nuggets: wanted k, at least 1; no more than n are given.

    Raises:
        InputError: neither or both of them given, or a value out of range.

    >>> count_nuggets(128, ratio=10), count_nuggets(3, ratio=10), count_nuggets(100, nuggets=7)
    (13, 1, 7)
    """
    if n < 1:
        raise InputError("there is nothing to select from: the text has no tokens")
    if (ratio is None) == (nuggets is None):
        raise InputError("give either a ratio or a number of nuggets, and not both")
    if nuggets is not None:
        if isinstance(nuggets, bool) or not isinstance(nuggets, Integral) or nuggets < 1:
            raise InputError(f"the number of nuggets must be a whole number of at least 1, not {nuggets!r}")
        return min(int(nuggets), n)
    assert ratio is not None
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not is_finite(ratio) or ratio < 1:
        raise InputError(f"ratio must be a number of at least 1 (10 keeps one token in ten), not {ratio!r}")
    return max(1, math.ceil(n / float(ratio) - 1e-9))  # 1e-9: n / (n / k) must give k back


def select_top_k(scores: Tensor, k: Tensor, mask: Tensor) -> Selection:
    """The k highest-scored tokens of each row, its last real token always among them.

    Ties go to the earlier token. Not differentiable; the scorer learns through `straight_through`.
    Paper: Eq. 14 and its footnote.

    Args:
        scores: float [B, T], finite wherever `mask` is true.
        k: int64 [B], how many to select; 1 <= k <= number of true entries of the row's mask.
        mask: bool [B, T], tokens that may be selected.

    Returns:
        Selection with K = max(k).

    Raises:
        InputError: a row has fewer candidates than k, or a candidate's score is not finite.
    """
    if not bool(torch.isfinite(scores[mask]).all()):
        raise InputError("a token's score is not finite: the scorer's weights or the base's features are broken")
    candidates = mask.sum(-1)
    if bool((k > candidates).any()) or bool((k < 1).any()):
        raise InputError(f"can't select {k.tolist()} tokens out of {candidates.tolist()}")
    places = torch.arange(scores.shape[1], device=scores.device)
    last = torch.where(mask, places, -1).amax(-1)  # [B], last real token of each row
    ranked = scores.detach().float().masked_fill(~mask, -torch.inf)
    ranked = ranked.masked_fill(places == last[:, None], torch.inf)
    order = ranked.argsort(dim=-1, descending=True, stable=True)[:, : int(k.max())]  # [B, K]
    chosen = torch.arange(order.shape[1], device=k.device) < k[:, None]
    past_the_end = scores.shape[1]
    indices = order.masked_fill(~chosen, past_the_end).sort(dim=-1).values  # ascending, unused ones last
    return Selection(indices=indices.masked_fill(~chosen, 0), mask=chosen)


def gather_tokens(states: Tensor, indices: Tensor) -> Tensor:
    """Take tokens out of per-head states.

    Args:
        states: [B, H, T, D].
        indices: int64 [B, K].

    Returns:
        [B, H, K, D], a new tensor; gradients flow to the taken tokens.
    """
    B, H, _, D = states.shape
    return states.gather(2, indices[:, None, :, None].expand(B, H, indices.shape[1], D))


def prefer_dense(scores: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Values whose top-k spreads k tokens over a row, closer together where scores are high.

    Beyond the paper. Each token weighs 1 + exp(s) / mean(exp(s)), and the tokens are taken at which the running sum of
    weights passes a multiple of its k-th part: equal scores give a fixed stride, and no stretch of more than 2 n / k tokens
    goes without. Where a token weighs more than such a part, the best-scored of the others fill up. Not differentiable.

    Args:
        scores, k, mask: as for `select_top_k`.

    Returns:
        fp32 [B, T].
    """
    device, (scores, k, mask) = scores.device, (x.detach().cpu() for x in (scores, k, mask))  # not every device has fp64
    own = scores.double()
    n = mask.sum(-1, keepdim=True)
    weights = own.masked_fill(~mask, -torch.inf).softmax(-1) * n
    passed = ((weights + 1) * mask).cumsum(-1)
    part = torch.floor(passed / passed[:, -1:] * k[:, None] + 1e-6)
    chosen = (part.diff(dim=-1, prepend=torch.zeros_like(part[:, :1])) > 0) & mask
    values = (own.sigmoid() + 2 * chosen).masked_fill(~own.isfinite(), torch.nan).float()  # which `select_top_k` refuses
    return values.to(device)


def stride(mask: Tensor, *, ratio: float, keep_first: bool) -> Tensor:
    """Values whose top-k are the last tokens of k equal parts of each text: the control that a learned selection must beat.

    Args:
        mask: bool [B, T], real tokens, padding on the right.
        ratio: r.
        keep_first: the first token stands outside.

    Returns:
        fp32 [B, T].
    """
    candidates = mask.clone()
    candidates[:, 0] &= ~((mask.sum(-1) > 1) & keep_first)
    k = torch.tensor([count_nuggets(n, ratio=ratio) for n in candidates.sum(-1).tolist()], device=mask.device)
    return prefer_dense(torch.zeros(mask.shape, device=mask.device), k, candidates)


def every(places: Tensor, *, ratio: float) -> Tensor:
    """Every r-th of places counted from 0, the last of each r: the stride of texts that go on.

    >>> every(torch.arange(7), ratio=3).tolist()
    [False, False, True, False, False, True, False]
    """
    return ((places + 1) / ratio).floor() > (places / ratio).floor()
