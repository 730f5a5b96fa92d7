"""Which k tokens leave least of a text lost: selection by coverage, beyond the paper.

A nugget holds what stands shortly before it. A token is lost to the `lost_share` of the distance of its next nugget, and a lost
token costs exp(TEMPER s) nats. Nuggets lie where the sum of that over a row is least, or where most of a text comes back word for
word. Both by dynamic programming over the gaps between nuggets: pure functions on scores and masks, not differentiable.

Shapes: B rows, N tokens of a row, W longest gap.
"""

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["TEMPER", "lost_share", "prefer_covering", "prefer_runs"]

TEMPER = 0.5
"""What a lost token costs is exp(TEMPER s). It grows less than the surprisal that scores are first fitted to."""
NEAR = 0.05
"""The share that is lost of a token beside a nugget."""
WIDEST = 4
"""The widest gap, in mean gaps."""
PRICES, ROUNDS = 64, 2
"""Prices of a nugget tried at once, and how often."""
RUN = 4
"""The longest runs of tokens that count. BLEU counts up to four words."""
NATS = 0.1
"""What a nat weighs beside the runs."""
DEAREST = 100.0
"""Nats that a lost token costs at most, beside runs."""
EXACTLY = 2048
"""Tokens of the longest rows for which just k nuggets are sought; of longer ones, as many as a price buys."""
BLOCK = 1024
"""Longer rows are cut into blocks of about so many tokens, which each end with a nugget: then all of them take a step at once."""


def prefer_covering(scores: Tensor, k: Tensor, mask: Tensor, *, reach: float) -> Tensor:
    """Values whose top-k are the k tokens that leave least of a row out of their reach.

    The k tokens, the last one among them, make the cost of what is lost least: dynamic programming with a price per nugget, which
    is searched until k are bought. Where no price tried buys just k, the best-scored of the others fill up. No stretch of more
    than WIDEST n / k tokens goes without.

    Args:
        scores, k, mask: as for `selection.select_top_k`; the true entries of a row of `mask` stand together.
        reach: above 0, in tokens.

    Returns:
        fp32 [B, T].
    """
    device, (scores, k, mask) = scores.device, (x.detach().cpu() for x in (scores, k, mask))  # not every device has fp64
    own = scores.double()
    costs = ((own - own.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)) * TEMPER).exp()
    rows, n, begin = _candidates(costs, mask)
    counts = k.cpu().numpy()
    found = _at_a_price(_lost(rows, _longest(n, counts), reach), rows.sum(-1), n, counts)
    return _marked(own, mask, begin, found).to(device)


def prefer_runs(scores: Tensor, k: Tensor, mask: Tensor, *, reach: float) -> Tensor:
    """Values whose top-k are the k tokens from which most of a row comes back word for word.

    That is counted as BLEU does it: runs of 1 to RUN tokens that come back whole, those of each length as a share of what even
    gaps would bring back; beside it, with a weight of NATS, the cost of what is lost. A token lost to a share x comes back with
    probability 1 - x (1 - exp(-c / 2)), c its cost in nats. Just k tokens, the last one among them, by dynamic programming; of
    rows of more than EXACTLY tokens, those that a price buys, as in `prefer_covering`. No stretch of more than WIDEST n / k
    tokens goes without.

    Args, returns: as for `prefer_covering`.
    """
    device, (scores, k, mask) = scores.device, (x.detach().cpu() for x in (scores, k, mask))  # not every device has fp64
    own = scores.double()
    rows, n, begin = _candidates((own * TEMPER).exp().clamp_max(DEAREST).nan_to_num(0), mask)
    found = []
    for row, count, size in zip(rows, n, k.cpu().numpy(), strict=True):
        costs, one = row[None, :count], np.array([size])
        longest = _longest(np.array([count]), one)
        stretches = NATS * _lost(costs, longest, reach) - _whole(costs[0], int(size), longest, reach)
        if count <= EXACTLY:
            found.append(_exactly(stretches[0], int(size)))
        else:
            worth = stretches[np.isfinite(stretches)]
            found += _at_a_price(stretches, np.array([worth.max() - 2 * worth.min()]), np.array([count]), one)
    return _marked(own, mask, begin, found).to(device)


def lost_share(distance: np.ndarray, reach: float) -> np.ndarray:
    """Share to which tokens are lost whose next nugget is d places on.

    None of a nugget itself, of others NEAR and, of the rest, 1 / (1 + exp((reach - d) / (reach / 7.5))).
    """
    share: np.ndarray = np.where(distance > 0, NEAR + (1 - NEAR) / (1 + np.exp((reach - distance) / (reach / 7.5))), 0)
    return share


def _candidates(costs: Tensor, mask: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs of the candidates alone, fp64 [B, N], 0 behind the n of a row; n, [B]; and where in the row they begin, [B]."""
    values, n, begin = costs.masked_fill(~mask, 0).cpu().numpy(), mask.sum(-1).cpu().numpy(), mask.int().argmax(-1).cpu().numpy()
    rows = np.zeros((len(n), int(n.max())))
    for row, (cost, first, count) in enumerate(zip(values, begin, n, strict=True)):
        rows[row, :count] = cost[first : first + count]
    return rows, n, begin


def _marked(own: Tensor, mask: Tensor, begin: np.ndarray, found: list[np.ndarray]) -> Tensor:
    """Values above 1 for what was found, below for others, and NaN, which `select_top_k` refuses, where a score is not finite."""
    chosen = torch.zeros_like(mask)
    for row, places in enumerate(found):
        chosen[row, torch.from_numpy(places + begin[row]).to(mask.device)] = True
    return (own.sigmoid() + chosen).masked_fill(~own.isfinite(), torch.nan).float()


def _longest(n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The longest gap of each row, in tokens."""
    widest: np.ndarray = np.ceil(WIDEST * n / k).astype(int)
    return widest


def _by_distance(costs: np.ndarray, longest: int) -> np.ndarray:
    """[B, N, W], at [.., i, d] the cost of the token d places before i; 0 where there is none."""
    padded = np.pad(costs, ((0, 0), (longest - 1, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, longest, axis=1)[..., ::-1]


def _lost(costs: np.ndarray, longest: np.ndarray, reach: float) -> np.ndarray:
    """[B, N, W], at [.., i, d] the cost of what is lost in a gap that begins d places before its nugget i; infinite where there
    can't be one."""
    distance = np.arange(min(costs.shape[1], int(longest.max())))
    lost = (_by_distance(costs, len(distance)) * lost_share(distance, reach)).cumsum(-1)
    possible = (distance <= np.arange(costs.shape[1])[:, None]) & (distance < longest[:, None, None])
    return np.where(possible, lost, np.inf)


def _whole(costs_N: np.ndarray, k: int, longest: np.ndarray, reach: float) -> np.ndarray:
    """[N, W], at [i, d] what is expected of BLEU in a gap that begins d places before its nugget i; of even gaps, 1 a token."""
    n = len(costs_N)
    distance = np.arange(min(n, int(longest[0])))
    right = 1 - (1 - np.exp(-_by_distance(costs_N[None], len(distance))[0] / 2)) * lost_share(distance, reach)
    ends = np.ceil(np.arange(1, k + 1) * n / k).astype(int) - 1
    even = np.diff(ends, prepend=-1) - 1
    whole, together = np.zeros_like(right), right
    cut = np.zeros_like(right)  # shorter runs at a gap's beginning, whose other tokens are before it and are taken to be right
    for m in range(1, RUN + 1):
        runs = cut.copy()
        runs[:, m - 1 :] += together.cumsum(-1)
        whole += runs / max(runs[ends, even].sum(), 1e-9) * n / RUN
        cut[:, m - 1 :] += together
        together = together[:, :-1] * right[:, m:]
    return whole


def _exactly(stretches: np.ndarray, k: int) -> np.ndarray:
    """Places of just k nuggets, the last of a row's tokens among them, at the least cost.

    Args:
        stretches: [N, W], cost of a gap by its nugget, and by what it has more than one token.
    """
    N, W = stretches.shape
    total = np.full((k + 1, N + 1), np.inf)  # least cost of the first tokens, with so many nuggets, one at their end
    gaps = np.zeros((k + 1, N + 1), dtype=np.int32)
    total[0, 0] = 0
    for at in range(N):
        reached = min(W, at + 1)
        options = total[:-1, at - reached + 1 : at + 1][:, ::-1] + stretches[at, :reached]
        best = options.argmin(-1)
        gaps[1:, at + 1] = best + 1
        total[1:, at + 1] = np.take_along_axis(options, best[:, None], -1)[:, 0]
    places, end = [], N
    for count in range(k, 0, -1):
        places.append(end - 1)
        end -= int(gaps[count, end])
    return np.array(places[::-1])


def _at_a_price(stretches: np.ndarray, dearest: np.ndarray, n: np.ndarray, k: np.ndarray) -> list[np.ndarray]:
    """Places of at most k nuggets in each row, the last of its n tokens among them: what the lowest price buys that buys so few.

    Args:
        stretches: [B, N, W], cost of a gap by its nugget, and by what it has more than one token.
        dearest: [B], more than any nugget is worth.
    """
    rows = np.arange(len(n))
    row_of, begin, size, cut = _blocks(stretches, n)
    high = dearest + 1
    low = high * 1e-9
    for _ in range(ROUNDS):
        prices = low[:, None] * (high / low)[:, None] ** np.linspace(0, 1, PRICES)
        counts, gaps = _bought(cut, prices[row_of])
        bought = np.zeros(prices.shape, dtype=int)  # ever fewer
        np.add.at(bought, row_of, counts[np.arange(len(size)), :, size - 1])
        enough = np.clip((bought > k[:, None]).sum(-1), 1, PRICES - 1)  # the first price that buys k or fewer
        low, high = prices[rows, enough - 1], prices[rows, enough]
    found: list[list[int]] = [[] for _ in n]
    for block in reversed(range(len(size))):
        row, at = row_of[block], int(size[block]) - 1
        while at >= 0:
            found[row].append(at + int(begin[block]))
            at -= int(gaps[block, enough[row], at])
    return [np.array(places[::-1]) for places in found]


def _blocks(stretches: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows as blocks of much the same size: the row of each, [C]; where in it each begins, and its tokens, [C]; and their
    stretches, [C, N', W]."""
    edges = [np.linspace(0, count, math.ceil(count / BLOCK) + 1 if count > EXACTLY else 2).astype(int) for count in n]
    row_of = np.repeat(np.arange(len(n)), [len(edge) - 1 for edge in edges])
    begin, size = np.concatenate([edge[:-1] for edge in edges]), np.concatenate([np.diff(edge) for edge in edges])
    if len(size) == len(n):
        return row_of, begin, size, stretches
    cut = np.zeros((len(size), int(size.max()), stretches.shape[2]))
    for block, (row, first, count) in enumerate(zip(row_of, begin, size, strict=True)):
        cut[block, :count] = stretches[row, first : first + count]
    return row_of, begin, size, cut


def _bought(stretches: np.ndarray, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For the best nuggets of a row's beginning that end with each token: how many, and how far back the one before it is.

    Args:
        stretches: [B, N, W]. prices: [B, P], of a nugget.

    Returns:
        int32 [B, P, N] twice.
    """
    (B, N, W), P = stretches.shape, prices.shape[1]
    total = np.zeros((B, P, N + 1))  # least cost of the first tokens, with a nugget at their end
    counts, gaps = np.zeros((B, P, N + 1), dtype=np.int32), np.zeros((B, P, N), dtype=np.int32)
    for at in range(N):
        reached = min(W, at + 1)
        options = total[:, :, at - reached + 1 : at + 1][:, :, ::-1] + stretches[:, None, at, :reached]
        best = options.argmin(-1)[..., None]
        gaps[:, :, at] = best[..., 0] + 1
        total[:, :, at + 1] = np.take_along_axis(options, best, -1)[..., 0] + prices
        counts[:, :, at + 1] = np.take_along_axis(counts, at - best, -1)[..., 0] + 1
    return counts[:, :, 1:], gaps
