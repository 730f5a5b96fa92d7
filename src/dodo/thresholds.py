"""Thresholds on scores: which ratio each of them gives.

Paper: Section 2.2, Eq. 8 and the paragraph behind it: Lambda is such that of t tokens about t / r score higher, estimated by
running a trained scorer on sampled text. Pure functions on scores; a table of them stands beside the adapters. Beyond the paper:
a threshold that follows the text, for texts differ in how high they score.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dodo.config import is_number, read_versioned
from dodo.errors import InputError

__all__ = ["RATIOS", "REACH", "THRESHOLDS_FILE", "Pace", "Thresholds", "realised_ratio"]

THRESHOLDS_FILE = "thresholds.json"
VERSION = 1
RATIOS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0)
"""r of the table's entries, tokens per nugget."""

REACH = 128
"""Tokens in which a threshold that follows the text makes up for what was kept too many or too few."""


@dataclass(frozen=True)
class Thresholds:
    """Lambda for a range of ratios, estimated with one scorer; another scorer needs another estimate.

    ratios: ascending, tokens per nugget.
    values: Lambda of each, in the unit of the scores (logits), ascending.
    tokens: how many scores they were estimated from.
    feature_window: tokens that the scorer's features looked back on (see `Autoregressive`).
    """

    ratios: tuple[float, ...]
    values: tuple[float, ...]
    tokens: int
    feature_window: int

    def __post_init__(self) -> None:
        for name in ("ratios", "values"):
            numbers = getattr(self, name)
            if not isinstance(numbers, list | tuple) or not all(map(is_number, numbers)) or list(numbers) != sorted(numbers):
                raise InputError(f"{name} of a table of thresholds must be ascending numbers, not {numbers!r}")
            object.__setattr__(self, name, tuple(map(float, numbers)))
        if len(self.ratios) != len(self.values) or len(self.ratios) < 2 or len(set(self.ratios)) < len(self.ratios):
            raise InputError("a table of thresholds needs two or more ratios, each with one value")
        if self.ratios[0] <= 1:
            raise InputError(f"the ratios of a table of thresholds must be above 1, not {self.ratios[0]:g}")
        for name in ("tokens", "feature_window"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"{name} of a table of thresholds must be a whole number of at least 1")

    @classmethod
    def estimate(cls, scores: Tensor, *, feature_window: int, ratios: Sequence[float] = RATIOS) -> "Thresholds":
        """Lambda of each ratio r: halfway between the n / r-th highest score and the next.

        Where these are equal, all of their equals are kept or none, whichever gives the ratio nearer to r (by their quotient).

        Args:
            scores: floating [n], of the tokens that compete in sampled texts.
            feature_window: what they were computed with.
            ratios: wanted, above 1.

        Raises:
            InputError: a score is not finite, or there are too few for the highest ratio.
        """
        ordered = scores.detach().flatten().double().sort(descending=True).values.tolist()
        n = len(ordered)
        if n == 0 or not all(map(math.isfinite, ordered)):
            raise InputError("thresholds need scores, and all of them finite" if n else "there are no scores to estimate from")
        if n < 2 * max(ratios):
            raise InputError(f"{n:,} scores are too few to estimate a threshold for ratio {max(ratios):g}")
        values = []
        for ratio in sorted(ratios):
            k = min(round(n / ratio), n - 1)
            if ordered[k - 1] == ordered[k]:
                above, equal = ordered.index(ordered[k]), ordered.count(ordered[k])
                if above * (above + equal) >= k * k:  # n / above is nearer
                    values.append(ordered[k])
                    continue
                k = above + equal
            below = ordered[k] if k < n else ordered[k - 1] - 1
            values.append((ordered[k - 1] + below) / 2)
        return cls(ratios=tuple(sorted(ratios)), values=tuple(values), tokens=n, feature_window=feature_window)

    def at(self, ratio: float) -> float:
        """Lambda for a ratio: linear in log r between the table's entries, -inf (all tokens) for ratio 1.

        Linear in log r because a score's tail that falls exponentially is a straight line there.

        Raises:
            InputError: a ratio that is neither 1 nor in the table's range.

        >>> table = Thresholds(ratios=(2, 8), values=(0, 4), tokens=100, feature_window=512)
        >>> table.at(2), table.at(4), table.at(1)
        (0.0, 2.0, -inf)
        """
        if ratio == 1:
            return -math.inf
        low, high = self.ratios[0], self.ratios[-1]
        if not is_number(ratio) or not low <= ratio <= high:
            raise InputError(f"there are thresholds for ratio 1 and for {low:g} to {high:g}, not for {ratio!r}")
        i = max(1, next(i for i, known in enumerate(self.ratios) if known >= ratio))
        part = math.log(ratio / self.ratios[i - 1]) / math.log(self.ratios[i] / self.ratios[i - 1])
        return self.values[i - 1] + part * (self.values[i] - self.values[i - 1])

    def to_json(self) -> str:
        """Indented JSON, with the version of its format."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = THRESHOLDS_FILE) -> "Thresholds":
        """Read what `to_json` wrote.

        Raises:
            InputError: not JSON, other keys, bad values, or a later version.
        """
        values = read_versioned(text, newest=VERSION, where=where)
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(values) != expected:
            raise InputError(f"{where} must have {', '.join(sorted(expected))}, not {', '.join(sorted(values))}")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Thresholds":
        """Read a `thresholds.json` file.

        Raises:
            InputError: no such file, or see `from_json`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"could not read {path}: {error}") from None
        return cls.from_json(text, where=str(path))


@dataclass(frozen=True)
class Pace:
    """A threshold that follows the text, so that of t tokens about t / r are kept, of a text that scores higher or lower too.

    thresholds: which threshold gives which ratio, on average over texts.
    ratio: r.

    Raises:
        InputError: a ratio that is not in the table's range; or 1, which is a threshold of minus infinity and follows nothing.
    """

    thresholds: Thresholds
    ratio: float

    def __post_init__(self) -> None:
        if self.thresholds.at(self.ratio) == -math.inf:
            raise InputError("ratio 1 keeps all tokens: its threshold is minus infinity, and does not follow the text")

    def at(self, owed: float) -> float:
        """Lambda for the next segment: that of the ratio r' which would make up in `REACH` tokens for what is owed.

        1 / r' = 1 / r + owed / REACH, within the table's range.

        Args:
            owed: nuggets that are missing of t / r, below 0 those too many; see `settle`.

        >>> table = Thresholds(ratios=(2, 8), values=(0, 4), tokens=100, feature_window=512)
        >>> pace = Pace(table, ratio=4)
        >>> pace.at(0), pace.at(32), pace.at(-16)
        (2.0, 0.0, 4.0)
        """
        low, high = self.thresholds.ratios[0], self.thresholds.ratios[-1]
        share = 1 / self.ratio + owed / REACH
        return self.thresholds.at(min(max(1 / max(share, 1 / high), low), high))

    def settle(self, owed: float, *, tokens: int, kept: int) -> float:
        """What is owed behind a segment, within bounds, so that no passage weighs on all that follows.

        The bounds are -1 and 2 times the nuggets of `REACH` tokens: r' is r / 3 at least, and has no upper bound but the table's.

        Args:
            owed: before it.
            tokens: that competed in it.
            kept: how many of them were kept.

        >>> pace = Pace(Thresholds(ratios=(2, 8), values=(0, 4), tokens=100, feature_window=512), ratio=4)
        >>> pace.settle(1.0, tokens=64, kept=10), pace.settle(1.0, tokens=64, kept=64), pace.settle(60.0, tokens=64, kept=0)
        (7.0, -32.0, 64.0)
        """
        worth = REACH / self.ratio
        return min(max(owed + tokens / self.ratio - kept, -worth), 2 * worth)


def realised_ratio(scores: Tensor, threshold: float) -> float:
    """Tokens per token that scores above the threshold; inf if none does.

    Args:
        scores: floating, any shape.
        threshold: Lambda.
    """
    kept = int((scores > threshold).sum())
    return scores.numel() / kept if kept else math.inf
