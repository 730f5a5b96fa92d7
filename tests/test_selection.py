"""Laws of `dodo.selection`."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from dodo.coverage import prefer_covering, prefer_runs
from dodo.errors import InputError
from dodo.selection import count_nuggets, gather_tokens, prefer_dense, select_top_k


@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 128, 2047])
@pytest.mark.parametrize("ratio", [1, 1.5, 5, 10, 20, 5000])
def test_k_is_the_ceiling_of_n_over_r(n: int, ratio: float) -> None:
    assert count_nuggets(n, ratio=ratio) == math.ceil(n / ratio)


@pytest.mark.parametrize("n", range(1, 200, 7))
def test_the_ratio_that_k_gives_gives_k_back(n: int) -> None:
    for k in range(1, n + 1):
        assert count_nuggets(n, ratio=n / k) == k


@pytest.mark.parametrize("ratio", [0, 0.5, -1, math.nan, math.inf, True, "10", None])
def test_a_ratio_below_one_or_no_number_is_refused(ratio: object) -> None:
    with pytest.raises(InputError):
        count_nuggets(10, ratio=ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize("nuggets", [0, -3, 2.0, True, "4"])
def test_a_number_of_nuggets_below_one_or_not_whole_is_refused(nuggets: object) -> None:
    with pytest.raises(InputError):
        count_nuggets(10, nuggets=nuggets)  # type: ignore[arg-type]


def test_ratio_and_number_together_are_refused() -> None:
    with pytest.raises(InputError, match="not both"):
        count_nuggets(10, ratio=2, nuggets=5)


def test_more_nuggets_than_tokens_give_all_tokens() -> None:
    assert count_nuggets(7, nuggets=100) == 7


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="no tokens"):
        count_nuggets(0, ratio=2)


def test_selection_equals_a_slow_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        n = int(torch.randint(1, 40, (), generator=generator))
        k = int(torch.randint(1, n + 1, (), generator=generator))
        scores = torch.randint(0, 6, (n,), generator=generator).float()  # many ties
        others = sorted(range(n - 1), key=lambda i: (-float(scores[i]), i))
        expected = sorted([*others[: k - 1], n - 1])
        chosen = select_top_k(scores[None], torch.tensor([k]), torch.ones(1, n, dtype=torch.bool))
        assert chosen.indices[0].tolist() == expected


def test_indices_are_unique_ascending_and_end_with_the_last_token() -> None:
    scores = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    chosen = select_top_k(scores, torch.full((5,), 9), torch.ones(5, 50, dtype=torch.bool))
    assert bool((chosen.indices.diff(dim=1) > 0).all())
    assert chosen.indices[:, -1].tolist() == [49] * 5


def test_rows_of_different_lengths_select_as_they_do_alone() -> None:
    scores = torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(20) < torch.tensor([[20], [11]])
    chosen = select_top_k(scores, torch.tensor([4, 3]), mask)
    alone = select_top_k(scores[1:, :11], torch.tensor([3]), mask[1:, :11])
    assert chosen.indices[1, :3].tolist() == alone.indices[0].tolist()
    assert chosen.mask.tolist() == [[True] * 4, [True] * 3 + [False]]


def test_padding_is_never_selected_even_with_the_highest_score() -> None:
    scores = torch.zeros(1, 6)
    scores[0, 4:] = 100
    mask = torch.tensor([[True] * 4 + [False] * 2])
    assert select_top_k(scores, torch.tensor([2]), mask).indices.tolist() == [[0, 3]]


def test_scores_that_are_not_finite_are_refused() -> None:
    scores = torch.tensor([[0.0, math.nan, 1.0]])
    with pytest.raises(InputError, match="not finite"):
        select_top_k(scores, torch.tensor([2]), torch.ones(1, 3, dtype=torch.bool))


def test_selecting_more_than_there_is_is_refused() -> None:
    with pytest.raises(InputError, match="can't select"):
        select_top_k(torch.zeros(1, 3), torch.tensor([4]), torch.ones(1, 3, dtype=torch.bool))


def test_gather_takes_the_same_tokens_of_every_head() -> None:
    states = torch.randn(2, 3, 7, 5)
    indices = torch.tensor([[0, 6], [2, 3]])
    taken = gather_tokens(states, indices)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(taken[b, h], states[b, h, indices[b]])


def _dense(scores: torch.Tensor, k: int, mask: torch.Tensor) -> list[int]:
    chosen = select_top_k(prefer_dense(scores, torch.tensor([k]), mask), torch.tensor([k]), mask)
    return chosen.indices[0].tolist()


def test_density_takes_the_tokens_where_the_running_weight_passes_each_part() -> None:
    """Against a slow loop, with candidates that begin late and end early."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        n = int(torch.randint(1, 40, (), generator=generator))
        k = int(torch.randint(1, n + 1, (), generator=generator))
        skip = int(torch.randint(0, 3, (), generator=generator))
        scores = torch.randn(1, skip + n + 2, generator=generator)
        mask = torch.zeros(1, skip + n + 2, dtype=torch.bool)
        mask[0, skip : skip + n] = True
        own = scores[0, skip : skip + n].double()
        weights = (1 + own.exp() / own.exp().mean()).tolist()
        expected, passed, part = [], 0.0, sum(weights) / k
        for i, weight in enumerate(weights):
            before, passed = passed, passed + weight
            if int(passed / part + 1e-6) > int(before / part + 1e-6):
                expected.append(skip + i)
        rest = sorted(set(range(skip, skip + n)) - set(expected), key=lambda i: -float(scores[0, i]))
        assert _dense(scores, k, mask) == sorted(expected + rest[: k - len(expected)])


def test_density_with_equal_scores_is_a_stride() -> None:
    assert _dense(torch.full((1, 13), 7.0), 4, torch.ones(1, 13, dtype=torch.bool)) == [3, 6, 9, 12]


def test_density_leaves_no_long_stretch_without_a_nugget() -> None:
    scores = torch.zeros(1, 200)
    scores[0, 100:120] = 50.0
    chosen = _dense(scores, 40, torch.ones(1, 200, dtype=torch.bool))
    gaps = torch.tensor([-1, *chosen]).diff()
    assert int(gaps.max()) <= 15
    assert sum(100 <= i < 120 for i in chosen) > 10


@pytest.mark.parametrize("spread", ["density", "coverage", "runs"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_however_nuggets_are_spread(spread: str, broken: float) -> None:
    scores, k, mask = torch.zeros(1, 30), torch.tensor([5]), torch.ones(1, 30, dtype=torch.bool)
    scores[0, 7] = broken
    covering = partial(prefer_covering, reach=10.0)
    values = {"density": prefer_dense, "coverage": covering, "runs": partial(prefer_runs, reach=10.0)}[spread](scores, k, mask)
    with pytest.raises(InputError, match="not finite"):
        select_top_k(values, k, mask)


def test_numbers_of_numpy_are_numbers() -> None:
    assert count_nuggets(30, ratio=np.float32(10)) == count_nuggets(30, ratio=np.int64(10)) == 3  # type: ignore[arg-type]
    assert count_nuggets(30, nuggets=np.int64(7)) == 7  # type: ignore[arg-type]
    for wrong in ("10", np.float32("nan"), True):
        with pytest.raises(InputError):
            count_nuggets(30, ratio=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [5.0, 20.0, 1e4])
def test_no_stretch_of_twice_the_ratio_goes_without_whatever_the_size_of_scores(size: float) -> None:
    scores = torch.cat([torch.full((1, 100), size), torch.full((1, 100), -size)], dim=1)
    real = torch.ones(1, 200, dtype=torch.bool)
    k = torch.tensor([20])
    chosen = select_top_k(prefer_dense(scores, k, real), k, real).indices[0]
    assert int(chosen.diff(prepend=torch.tensor([-1])).max()) <= 2 * 200 // 20
