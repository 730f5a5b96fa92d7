"""Methods against Dodo item by item: two that measured the same items differ by less noise than their means' errors say."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Difference", "differences", "of_dodo"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Dodo's value of each item less another method's: the mean of n of them, and its standard error."""

    dodo: Record
    other: Record
    group: str
    n: int
    mean: float
    error: float


def differences(records: Sequence[Record]) -> Iterator[Difference]:
    """Every record of another method beside each of Dodo's of the same items at the same ratio; what has none beside all.

    Args:
        records: of one task. Those without values of single items (`each`) are passed over. Items are drawn in a fixed order, so
            that of two with different limits the first ones are the same.
    """
    for other in (record for record in records if record["settings"]["method"] != "dodo"):
        for dodo in (record for record in of_dodo(records) if _same(record, other)):
            for group, theirs in (other.get("each") or {}).items():
                ours = (dodo.get("each") or {}).get(group, [])
                n = min(len(ours), len(theirs))
                if n > 1 and _begin_alike(dodo, other, group):
                    less = np.array(ours[:n]) - np.array(theirs[:n])
                    of = (dodo.get("each of") or {}).get(group, range(n))[:n]
                    yield Difference(dodo, other, group, n, float(less.mean()), standard_error(less, of))


def of_dodo(records: Sequence[Record]) -> list[Record]:
    """Dodo's records: those of trained adapters, or those of fresh ones where there are no others."""
    mine = [record for record in records if record["settings"]["method"] == "dodo"]
    return [record for record in mine if record["settings"].get("adapters") == "trained"] or mine


def standard_error(values: np.ndarray, of: Sequence[int]) -> float:
    """Of the mean of values that depend on each other where they are of the same text, as segments are.

    Args:
        values: float [n].
        of: n numbers, of texts. Of a single text, its values count as independent.

    >>> standard_error(np.array([1.0, 3.0]), [0, 1]), standard_error(np.array([1.0, 1.0, 3.0, 3.0]), [0, 0, 1, 1])
    (1.0, 1.0)
    """
    texts, which = np.unique(of, return_inverse=True)
    if len(texts) == 1:
        texts, which = np.arange(len(values)), np.arange(len(values))
    sums = np.bincount(which, weights=values - values.mean())
    return float(np.sqrt((sums**2).sum() * len(texts) / (len(texts) - 1)) / len(values))


def _begin_alike(dodo: Record, other: Record, group: str) -> bool:
    """Whether the first items of the group are the same. Older records tell it of all groups together, or not at all."""
    if _whole_from(dodo, group) != _whole_from(other, group):
        return False
    one, two = (record["settings"].get("first items") for record in (dodo, other))
    if isinstance(one, dict) and isinstance(two, dict):
        return bool(one.get(group) == two.get(group))
    return type(one) is not type(two) or bool(one == two)


def _whole_from(record: Record, group: str) -> int | None:
    """Where in a text the group's segments begin to count, in tokens; None where that plays no part."""
    settings = record["settings"]
    if "whole histories from" not in settings:
        return None
    found: dict[str, int] = dict(zip(map("{} states".format, settings["states"]), settings["whole histories from"], strict=True))
    return found.get(group)


def _same(dodo: Record, other: Record) -> bool:
    one, two = dodo["settings"], other["settings"]
    names = ["data", "seed", "base fingerprint", *(["ratio"] if two["ratio"] is not None else [])]
    if "segment" in two:  # those of texts drawn from all over: others at another limit
        names += ["segment", "limit", "keep_first"]
    names += ["share of whole tokens"] if two.get("share of whole tokens") is not None else []
    return all(one.get(name) == two.get(name) for name in names)
