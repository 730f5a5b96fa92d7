"""Laws of thresholds (Eq. 8)."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from dodo.errors import InputError
from dodo.thresholds import RATIOS, REACH, Pace, Thresholds, realised_ratio


def _scores(n: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3 - 1


TABLE = Thresholds.estimate(_scores(20_000), feature_window=512)


def test_each_threshold_keeps_one_token_in_r() -> None:
    assert TABLE.ratios == RATIOS
    for ratio in RATIOS:
        assert realised_ratio(_scores(20_000), TABLE.at(ratio)) == pytest.approx(ratio, rel=2e-3)  # n / r rounded
        assert realised_ratio(_scores(20_000, seed=1), TABLE.at(ratio)) == pytest.approx(ratio, rel=0.1)


def test_between_its_entries_a_table_gives_ratios_between() -> None:
    for ratio in (1.7, 3.5, 7, 13.3, 33):
        assert realised_ratio(_scores(20_000), TABLE.at(ratio)) == pytest.approx(ratio, rel=0.03)
    assert all(TABLE.at(ratio) == value for ratio, value in zip(TABLE.ratios, TABLE.values, strict=True))


def test_no_threshold_falls_on_a_score() -> None:
    """So that scores computed in another order are not decided otherwise."""
    assert not set(TABLE.values) & set(_scores(20_000).double().tolist())


def test_ratio_one_keeps_all_and_other_ratios_are_refused() -> None:
    assert TABLE.at(1) == -math.inf
    for ratio in (0.5, 1.2, 41, math.nan, math.inf):
        with pytest.raises(InputError, match=r"1\.5 to 40"):
            TABLE.at(ratio)


def test_nothing_kept_is_an_infinite_ratio() -> None:
    assert realised_ratio(_scores(10), math.inf) == math.inf
    assert realised_ratio(_scores(10), -math.inf) == 1


def test_a_file_gives_back_the_table(tmp_path: Path) -> None:
    (tmp_path / "thresholds.json").write_text(TABLE.to_json())
    assert Thresholds.load(tmp_path / "thresholds.json") == TABLE


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"extra": 1},
        {"values": [1.0]},
        {"values": list(TABLE.values[::-1])},
        {"values": ["a"] * len(RATIOS)},
        {"ratios": [0.5, *RATIOS[1:]]},
        {"tokens": 0},
        {"feature_window": None},
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, object]) -> None:
    values = json.loads(TABLE.to_json()) | change
    with pytest.raises(InputError):
        Thresholds.from_json(json.dumps(values))
    with pytest.raises(InputError):
        Thresholds.from_json(json.dumps(values)[:-9])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.json"):
        Thresholds.load(tmp_path / "none.json")


@pytest.mark.parametrize("scores", [torch.tensor([]), torch.tensor([0.0, math.nan] * 50), torch.zeros(50)])
def test_scores_that_are_too_few_or_not_finite_are_refused(scores: torch.Tensor) -> None:
    with pytest.raises(InputError):
        Thresholds.estimate(scores, feature_window=8)


def test_of_equal_scores_all_are_kept_or_none_by_what_is_nearer_to_the_ratio() -> None:
    assert set(_estimated(torch.zeros(100)).values()) == {1}, "none would be infinitely far"
    tied = torch.cat([torch.full((300,), 2.0), torch.linspace(-1, 1, 700)])
    wanted = {4.0: 1000 / 300, 40.0: 1000 / 300, 2.0: 2.0}
    assert {ratio: _estimated(tied)[ratio] for ratio in wanted} == pytest.approx(wanted, rel=2e-3)
    above = torch.cat([torch.linspace(3, 4, 100), tied])
    wanted = {3.0: 1100 / 400, 4.0: 1100 / 400, 8.0: 11.0, 10.0: 11.0, 40.0: 1100 / 28}
    assert {ratio: _estimated(above)[ratio] for ratio in wanted} == pytest.approx(wanted, rel=2e-2)


def _estimated(scores: torch.Tensor) -> dict[float, float]:
    table = Thresholds.estimate(scores, feature_window=8)
    return {ratio: realised_ratio(scores, table.at(ratio)) for ratio in table.ratios}


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TABLE.tokens = 3  # type: ignore[misc]


# -- a threshold that follows the text


@pytest.mark.parametrize("higher", [-1.5, 0.0, 1.5])
def test_as_many_are_kept_of_texts_that_score_higher_or_lower(higher: float) -> None:
    """Their own threshold would be half a standard deviation off, at which the table's keeps twice as many or half of them."""
    scores, ratio = _scores(8_000, seed=2) + higher, 8
    kept = _kept(Pace(TABLE, ratio), scores)
    assert bool(((kept.cumsum(0) - torch.arange(16, 8_001, 16) / ratio).abs() < 2 * REACH / ratio).all())
    assert int(kept.sum()) == pytest.approx(len(scores) / ratio, rel=0.03)
    fixed = realised_ratio(scores, TABLE.at(ratio))
    assert higher == 0 or not 0.7 < fixed / ratio < 1.4


def _kept(pace: Pace, scores: torch.Tensor, *, segment: int = 16) -> torch.Tensor:
    """How many of each segment."""
    kept, owed = [], 0.0
    for piece in scores.split(segment):
        kept.append(int((piece > pace.at(owed)).sum()))
        owed = pace.settle(owed, tokens=len(piece), kept=kept[-1])
    return torch.tensor(kept)


@pytest.mark.parametrize("passage", [-99.0, 99.0])
@pytest.mark.parametrize("length", [256, 8_192])
def test_a_passage_that_no_threshold_divides_weighs_on_what_follows_for_a_while_only(passage: float, length: int) -> None:
    scores = torch.cat([_scores(512), torch.full((length,), passage), _scores(4_096, seed=3)])
    ratio, owed = 8, 2 * REACH / 8 if passage < 0 else -REACH / 8
    after = _kept(Pace(TABLE, ratio), scores)[-4_096 // 16 :]
    soon, later = int(after[: 4 * REACH // 16].sum()), after[4 * REACH // 16 :]
    assert soon == pytest.approx(4 * REACH / ratio + owed, abs=8)
    assert float(later.float().mean()) == pytest.approx(16 / ratio, rel=0.05)


def test_a_pace_stays_within_its_table() -> None:
    pace = Pace(TABLE, 10)
    assert pace.at(0) == TABLE.at(10)
    assert pace.at(1_000) == TABLE.values[0]
    assert pace.at(-1_000) == TABLE.values[-1]
    with pytest.raises(InputError, match=r"1\.5 to 40"):
        Pace(TABLE, 50)
    with pytest.raises(InputError, match="ratio 1 keeps all tokens"):
        Pace(TABLE, 1)
