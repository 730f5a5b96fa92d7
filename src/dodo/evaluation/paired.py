"""Methods against Dodo item by item: two that measured the same items differ by less noise than their means' errors say."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Difference", "differences"]

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
    for other in records:
        for dodo in records:
            if other["settings"]["method"] == "dodo" or dodo["settings"]["method"] != "dodo" or not _same(dodo, other):
                continue
            for group, theirs in (other.get("each") or {}).items():
                ours = (dodo.get("each") or {}).get(group, [])
                n = min(len(ours), len(theirs))
                if n > 1:
                    less = np.array(ours[:n]) - np.array(theirs[:n])
                    yield Difference(dodo, other, group, n, float(less.mean()), float(less.std(ddof=1) / n**0.5))


def _same(dodo: Record, other: Record) -> bool:
    one, two = dodo["settings"], other["settings"]
    names = ["data", "seed", "base fingerprint", *(["ratio"] if two["ratio"] is not None else [])]
    if "segment" in two:  # those of texts drawn from all over: others at another limit
        names += ["segment", "limit", "keep_first", "whole histories from"]
    names += ["share of whole tokens"] if two.get("share of whole tokens") is not None else []
    names += ["first items"] if {"first items"} <= one.keys() & two.keys() else []  # older records do not tell
    return all(one.get(name) == two.get(name) for name in names)
