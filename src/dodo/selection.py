"""How many nuggets, and which tokens: pure functions on scores and masks.

Paper: Section 2.3, Eq. 14 (top-k) with its footnote (the last token is always selected), and k = ceil(n / r).

Shapes: B batch, T tokens, K nuggets, H key/value heads, D head width.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dodo.errors import InputError

__all__ = [
    "Selection",
    "count_nuggets",
    "every",
    "gather_tokens",
    "lost_share",
    "prefer_covering",
    "prefer_dense",
    "select_top_k",
    "stride",
]

TEMPER = 0.5
"""Of coverage: what a lost token costs is exp(TEMPER s). It grows less than the surprisal that scores are first fitted to."""
NEAR = 0.05
"""Of coverage: the share that is lost of a token beside a nugget."""
WIDEST = 4
"""Of coverage: the widest gap, in mean gaps."""
PRICES, ROUNDS = 64, 2
"""Of coverage: prices tried at once, and how often."""


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
        if isinstance(nuggets, bool) or not isinstance(nuggets, int) or nuggets < 1:
            raise InputError(f"the number of nuggets must be a whole number of at least 1, not {nuggets!r}")
        return min(nuggets, n)
    assert ratio is not None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not math.isfinite(ratio) or ratio < 1:
        raise InputError(f"ratio must be a number of at least 1 (10 keeps one token in ten), not {ratio!r}")
    return max(1, math.ceil(n / ratio - 1e-9))  # 1e-9: n / (n / k) must give k back


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
    own = scores.detach().double()
    n = mask.sum(-1, keepdim=True)
    weights = own.masked_fill(~mask, -torch.inf).softmax(-1) * n
    passed = ((weights + 1) * mask).cumsum(-1)
    part = torch.floor(passed / passed[:, -1:] * k[:, None] + 1e-6)
    chosen = (part.diff(dim=-1, prepend=torch.zeros_like(part[:, :1])) > 0) & mask
    return (own.sigmoid() + chosen).masked_fill(~own.isfinite(), torch.nan).float()  # which `select_top_k` refuses


def prefer_covering(scores: Tensor, k: Tensor, mask: Tensor, *, reach: float) -> Tensor:
    """Values whose top-k are the k tokens that leave least of a row out of their reach.

    Beyond the paper. A nugget holds what stands shortly before it. A token is lost to the `lost_share` of the distance of its
    next nugget, and a lost token costs exp(TEMPER s). The k tokens, the last one among them, make the sum of that over the row
    least: dynamic programming with a price per nugget, which is searched until k are bought. Where no price tried buys just k,
    the best-scored of the others fill up. No stretch of more than WIDEST n / k tokens goes without. Not differentiable.

    Args:
        scores, k, mask: as for `select_top_k`; the true entries of a row of `mask` stand together.
        reach: above 0, in tokens.

    Returns:
        fp32 [B, T].
    """
    own = scores.detach().double()
    costs = ((own - own.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)) * TEMPER).exp().masked_fill(~mask, 0).cpu().numpy()
    n, begin = mask.sum(-1).cpu().numpy(), mask.int().argmax(-1).cpu().numpy()
    rows = np.zeros((len(n), int(n.max())))
    for row, (cost, first, count) in enumerate(zip(costs, begin, n, strict=True)):
        rows[row, :count] = cost[first : first + count]
    chosen = torch.zeros_like(mask)
    for row, places in enumerate(_cover(rows, n, k.cpu().numpy(), reach)):
        chosen[row, torch.from_numpy(places + begin[row]).to(mask.device)] = True
    return (own.sigmoid() + chosen).masked_fill(~own.isfinite(), torch.nan).float()  # which `select_top_k` refuses


def lost_share(distance: np.ndarray, reach: float) -> np.ndarray:
    """Share to which tokens are lost whose next nugget is d places on.

    None of a nugget itself, of others NEAR and, of the rest, 1 / (1 + exp((reach - d) / (reach / 7.5))).
    """
    share: np.ndarray = np.where(distance > 0, NEAR + (1 - NEAR) / (1 + np.exp((reach - distance) / (reach / 7.5))), 0)
    return share


def _cover(costs: np.ndarray, n: np.ndarray, k: np.ndarray, reach: float) -> list[np.ndarray]:
    """Places of at most k nuggets in each row, the last of its n tokens among them: what the lowest price buys that buys so few.

    Args:
        costs: fp64 [B, N], 0 or more, of a lost token; 0 behind the n of a row.
    """
    widest = np.ceil(WIDEST * n / k)
    distance = np.arange(min(costs.shape[1], int(widest.max())))
    lost = lost_share(distance, reach)
    barred = np.where(distance < widest[:, None], 0, np.inf)
    rows = np.arange(len(n))
    high = costs.sum(-1) + 1
    low = high * 1e-9
    for _ in range(ROUNDS):
        prices = low[:, None] * (high / low)[:, None] ** np.linspace(0, 1, PRICES)
        counts, gaps = _bought(costs, prices, lost, barred)
        bought = counts[rows, :, n - 1]  # [B, P], ever fewer
        enough = np.clip((bought > k[:, None]).sum(-1), 1, PRICES - 1)  # the first price that buys k or fewer
        low, high = prices[rows, enough - 1], prices[rows, enough]
    found = []
    for row, count in enumerate(n):
        places, at = [], int(count) - 1
        while at >= 0:
            places.append(at)
            at -= int(gaps[row, enough[row], at])
        found.append(np.array(places[::-1]))
    return found


def _bought(costs: np.ndarray, prices: np.ndarray, lost: np.ndarray, barred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For the best nuggets of a row's beginning that end with each token: how many, and how far back the one before it is.

    Args:
        costs: [B, N]. prices: [B, P], of a nugget. lost: [W], share of a token that is lost by the distance of its next nugget.
        barred: [B, W], infinite for gaps that may not be, by what they have more than one token; 0 for others.

    Returns:
        int32 [B, P, N] twice.
    """
    (B, N), P, W = costs.shape, prices.shape[1], len(lost)
    total = np.zeros((B, P, N + 1))  # least cost of the first tokens, with a nugget at their end
    counts, gaps = np.zeros((B, P, N + 1), dtype=np.int32), np.zeros((B, P, N), dtype=np.int32)
    for at in range(N):
        reached = min(W, at + 1)
        stretch = (costs[:, at - reached + 1 : at + 1][:, ::-1] * lost[:reached]).cumsum(-1) + barred[:, :reached]
        options = total[:, :, at - reached + 1 : at + 1][:, :, ::-1] + stretch[:, None]
        best = options.argmin(-1)[..., None]
        gaps[:, :, at] = best[..., 0] + 1
        total[:, :, at + 1] = np.take_along_axis(options, best, -1)[..., 0] + prices
        counts[:, :, at + 1] = np.take_along_axis(counts, at - best, -1)[..., 0] + 1
    return counts[:, :, 1:], gaps


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
