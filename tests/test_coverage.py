"""Laws of `dodo.coverage`, some of them against every selection there is."""

import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from dodo import coverage
from dodo.coverage import prefer_covering, prefer_runs
from dodo.selection import prefer_dense, select_top_k
from tests.conftest import Pair


def _chosen(
    prefer: Callable[..., torch.Tensor], scores: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, reach: float
) -> list[list[int]]:
    chosen = select_top_k(prefer(scores, k, mask, reach=reach), k, mask)
    return [row[some].tolist() for row, some in zip(chosen.indices, chosen.mask, strict=True)]


def _found_and_all(
    prefer: Callable[..., torch.Tensor], scores: torch.Tensor, reach: float
) -> Iterator[tuple[torch.Tensor, tuple[int, ...], list[tuple[int, ...]]]]:
    """For rows [6, 16] of several lengths at once, whose candidates begin late and end early: costs, the places found, and all
    that there are."""
    n, skip = torch.tensor([12, 11, 10, 9, 7, 3]), torch.tensor([0, 1, 2, 0, 1, 2])
    k = torch.tensor([4, 5, 6, 3, 7, 2])
    places = torch.arange(16)
    mask = (places >= skip[:, None]) & (places < (skip + n)[:, None])
    for row, found in enumerate(_chosen(prefer, scores, k, mask, reach)):
        begin, count, size = int(skip[row]), int(n[row]), int(k[row])
        assert len(found) == size
        every = [(*some, count - 1) for some in itertools.combinations(range(count - 1), size - 1)]
        widest = math.ceil(4 * count / size)
        allowed = [some for some in every if max(map(_gap, itertools.pairwise((-1, *some)))) <= widest]
        yield (scores[row, begin : begin + count].double() / 2).exp(), tuple(place - begin for place in found), allowed


def _gap(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]


def _lost(costs: torch.Tensor, places: tuple[int, ...], reach: float) -> float:
    """Of a row whose nuggets are at these places, the last token among them."""
    distances = [min(p for p in places if p >= i) - i for i in range(len(costs))]
    return float(sum(cost * _share(d, reach) for cost, d in zip(costs.tolist(), distances, strict=True)))


def _share(distance: int, reach: float) -> float:
    return 0.05 + 0.95 / (1 + math.exp((reach - distance) / (reach / 7.5))) if distance else 0.0


@pytest.mark.parametrize("reach", [0.5, 2.0, 4.0])
def test_covering_loses_least_of_all_selections(reach: float) -> None:
    scores = 3 * torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    for costs, found, every in _found_and_all(prefer_covering, scores, reach):
        least = min(_lost(costs, some, reach) for some in every)
        assert _lost(costs, found, reach) == pytest.approx(least, rel=1e-3)  # prices are searched to half a hundredth


def test_covering_with_equal_scores_has_equal_gaps() -> None:
    found = _chosen(prefer_covering, torch.full((1, 13), 7.0), torch.tensor([4]), torch.ones(1, 13, dtype=torch.bool), 10.0)
    assert sorted(map(_gap, itertools.pairwise((-1, *found[0])))) == [3, 3, 3, 4]


def test_covering_spends_nuggets_where_tokens_are_dear() -> None:
    """What is cheap lies out of reach of the nugget behind it; stretches without one have an end all the same."""
    scores = torch.zeros(1, 200)
    scores[0, 100:120] = 20.0
    found = _chosen(prefer_covering, scores, torch.tensor([20]), torch.ones(1, 200, dtype=torch.bool), 4.0)[0]
    gaps = list(map(_gap, itertools.pairwise((-1, *found))))
    assert max(gaps) <= 40
    assert sum(100 <= i < 124 for i in found) >= 8


@pytest.mark.parametrize("prefer", [prefer_covering, prefer_runs])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_every_token_is_taken_where_all_are_wanted(prefer: Callable[..., torch.Tensor], n: int) -> None:
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    assert _chosen(prefer, scores, torch.tensor([n]), torch.ones(1, n, dtype=torch.bool), 10.0) == [list(range(n))]


def _runs(costs: Sequence[float], places: tuple[int, ...], reach: float) -> list[float]:
    """Expected number of runs of 1, 2, 3 and 4 right tokens; of a run, the tokens before its last one's gap are right."""
    found = [0.0] * 4
    for begin, end in itertools.pairwise((-1, *places)):
        right = {i: 1 - (1 - math.exp(-costs[i] / 2)) * _share(end - i, reach) for i in range(begin + 1, end + 1)}
        for m in range(4):
            found[m] += sum(math.prod(right.get(last - j, 1.0) for j in range(m + 1)) for last in right)
    return found


def _worth(costs: torch.Tensor, places: tuple[int, ...], reach: float) -> float:
    """What the selection by runs is to make most: of runs, the share of an even stride's, and the cost of what is lost."""
    n, k = len(costs), len(places)
    even = tuple(math.ceil(j * n / k) - 1 for j in range(1, k + 1))
    values = costs.tolist()
    shares = [mine / theirs for mine, theirs in zip(_runs(values, places, reach), _runs(values, even, reach), strict=True)]
    return n * sum(shares) / 4 - 0.1 * _lost(costs, places, reach)


@pytest.mark.parametrize("reach", [0.5, 2.0, 4.0])
def test_most_comes_back_of_all_selections(reach: float) -> None:
    scores = 2 + 2 * torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    for costs, found, every in _found_and_all(prefer_runs, scores, reach):
        most = max(_worth(costs, some, reach) for some in every)
        assert _worth(costs, found, reach) == pytest.approx(most, rel=1e-6)


def test_long_rows_are_worth_about_as_much_at_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, mask = 2 + torch.randn(1, 400, generator=torch.Generator().manual_seed(1)), torch.ones(1, 400, dtype=torch.bool)
    costs, k = (scores[0].double() / 2).exp(), torch.tensor([40])
    exact = _chosen(prefer_runs, scores, k, mask, 7.3)[0]
    monkeypatch.setattr(coverage, "EXACTLY", 399)
    monkeypatch.delattr(coverage, "_exactly")
    priced = _chosen(prefer_runs, scores, k, mask, 7.3)[0]
    assert len(exact) == len(priced) == 40
    best = _worth(costs, tuple(exact), 7.3)
    assert best * 0.99 <= _worth(costs, tuple(priced), 7.3) <= best + 1e-9


@pytest.mark.parametrize(("prefer", "closely"), [(prefer_covering, 0.01), (prefer_runs, 0.02)])
def test_long_rows_cut_into_blocks_lose_about_as_little_as_whole_ones(
    prefer: Callable[..., torch.Tensor], closely: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = torch.tensor([2900, 350, 800]), torch.tensor([290, 70, 40])
    scores = 2 * torch.randn(3, 3000, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(3000) >= 7) & (torch.arange(3000) < 7 + n[:, None])
    monkeypatch.setattr(coverage, "EXACTLY", 400)
    monkeypatch.setattr(coverage, "BLOCK", 10_000)
    whole = _chosen(prefer, scores, k, mask, 7.3)
    monkeypatch.setattr(coverage, "BLOCK", 500)
    cut = _chosen(prefer, scores, k, mask, 7.3)
    assert cut[1] == whole[1]  # too short to be cut
    assert cut[0] != whole[0]
    for row, (one, other) in enumerate(zip(cut, whole, strict=True)):
        assert len(one) == len(other) == k[row]
        costs = (scores[row, 7 : 7 + n[row]].double() / 2).exp()
        worth = _lost if prefer is prefer_covering else _worth
        values = [worth(costs, tuple(place - 7 for place in places), 7.3) for places in (one, other)]  # type: ignore[operator]
        assert values[0] == pytest.approx(values[1], rel=closely)


def test_few_nuggets_of_a_long_text_are_spread_by_density(pair: Callable[..., Pair]) -> None:
    """Where gaps are long, looking for the best places would take memory by their length."""
    compressor = pair("llama", selection="coverage", runs=True).compressor
    scores, real = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1)), torch.ones(3, 2000, dtype=torch.bool)
    real[1, 100:] = False
    tracemalloc.start()
    selection, _ = compressor.select(scores, real, nuggets=4, use="text")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    dense = select_top_k(prefer_dense(scores, torch.tensor([4] * 3), real), torch.tensor([4] * 3), real)
    assert torch.equal(selection.indices[[0, 2]], dense.indices[[0, 2]])
    alone, _ = compressor.select(scores[1:2, :100], real[1:2, :100], nuggets=4, use="text")
    assert torch.equal(selection.indices[1], alone.indices[0])  # it is short enough to be looked at closely
