"""Thresholds of a scorer, and what they give on texts from which they were not estimated.

Paper: Section 2.2: r is about t / k, and Lambda is estimated by running a trained scorer on sampled tokens.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from dodo.data.reading import naming, read_records, resolve, text_field
from dodo.errors import DodoWarning, InputError
from dodo.model import Dodo
from dodo.thresholds import Thresholds, realised_ratio

__all__ = ["MOST_TEXTS", "STRETCH", "Calibration", "calibrate"]

MOST_TEXTS = 20_000
"""Of each source; those behind them are not read, with a warning."""

STRETCH = 1024
"""Tokens of one text at most where there are texts enough, a random stretch of a longer one, so that few texts don't decide."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What came of it.

    thresholds: the table, estimated from `texts` texts.
    checked_texts: other texts, on which it was tried.
    checked_scores: fp32 [n], of all their tokens but for kept first ones.
    """

    thresholds: Thresholds
    texts: int
    checked_texts: int
    checked_scores: Tensor

    def realised(self, ratio: float) -> float:
        """Tokens per kept token with the threshold for a ratio, on the texts it was tried on; inf if none is kept.

        Raises:
            InputError: the table has no such ratio.
        """
        return realised_ratio(self.checked_scores, self.thresholds.at(ratio))


def calibrate(
    dodo: Dodo,
    sources: Sequence[str],
    *,
    tokens: int = 100_000,
    held_out: float = 0.2,
    check: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Estimate `dodo.thresholds` from some texts of a corpus in random order, and try them on others.

    Args:
        dodo: whose scorer.
        sources: files, patterns or `hf:` ids, records with `text`.
        tokens: sampled for the estimate, and at most as many to try it on.
        held_out: share of the texts, above 0 and below 1, that is set aside to try them on.
        check: sources of texts to try them on instead; those of them that the corpus has are not sampled.
        seed: of the order.
        progress: told how many tokens are scored, and how many there are.

    Raises:
        InputError: a bad number, no texts to sample or to try, or too few tokens.
    """
    if not 0 < held_out < 1:
        raise InputError(f"the share held out must be above 0 and below 1, not {held_out!r}")
    if tokens < 1:
        raise InputError(f"tokens must be at least 1, not {tokens}")
    rng = np.random.default_rng(seed)
    texts = _shuffled(_texts(sources), rng)
    if check:
        others = _shuffled(_texts(check), rng)
        known = set(others)
        texts = [text for text in texts if text not in known]
    else:
        count = max(1, round(held_out * len(texts)))
        others, texts = texts[:count], texts[count:]
    for found, what in ((others, "try the thresholds on"), (texts, "estimate thresholds from")):
        if not found:
            raise InputError(f"there are no texts left to {what}: give two texts or more, or others to try them on")
    sampled, tried = _sample(dodo, texts, tokens, rng), _sample(dodo, others, tokens, rng)
    if (had := sum(map(len, sampled))) < tokens:
        warnings.warn(f"the texts to sample have {had:,} tokens, fewer than {tokens:,}", DodoWarning, stacklevel=2)

    done, total = 0, sum(map(len, sampled + tried))

    def counted(rows: list[list[int]]) -> Iterator[list[int]]:
        nonlocal done
        for row in rows:
            yield row
            done += len(row)
            if progress is not None:
                progress(done, total)

    table = dodo.estimate_thresholds(counted(sampled))
    scores = dodo.autoregressive(ratio=1).sampled_scores(counted(tried))
    if scores.numel() == 0:
        raise InputError("the texts to try the thresholds on have no tokens but first ones")
    return Calibration(table, len(sampled), len(tried), scores)


def _texts(sources: Sequence[str]) -> list[str]:
    """All different texts that are not blank."""
    found: dict[str, None] = {}
    for source in resolve(sources):
        records = read_records(source, fields=("text",))
        for number, record in enumerate(islice(records, MOST_TEXTS), 1):
            with naming(f"{source}, record {number}"):
                found[text_field(record)] = None
        if next(records, None) is not None:
            warnings.warn(f"of {source} only the first {MOST_TEXTS:,} texts are read", DodoWarning, stacklevel=3)
    return [text for text in found if text.strip()]


def _shuffled(texts: list[str], rng: np.random.Generator) -> list[str]:
    return [texts[i] for i in rng.permutation(len(texts))]


def _sample(dodo: Dodo, texts: Sequence[str], tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Token ids, `tokens` of them if there are as many: of each text, or of a random stretch of a long one."""
    read: list[list[int]] = []
    longest, had = STRETCH, 0
    for text in texts:
        read.append(dodo.document_ids(text))
        had += min(len(read[-1]), STRETCH)
        if had >= tokens:
            break
    else:
        longest = _stretch([len(ids) for ids in read], tokens)
    rows: list[list[int]] = []
    for ids in read:
        start = int(rng.integers(max(0, len(ids) - longest) + 1))
        rows.append(ids[start : start + min(longest, tokens)])
        tokens -= len(rows[-1])
        if tokens == 0:
            break
    return rows


def _stretch(lengths: list[int], tokens: int) -> int:
    """The shortest stretch such that those of texts of these lengths make so many tokens; that of the longest text if none do.

    >>> _stretch([20, 10_000, 50], 3000), _stretch([20, 50], 3000)
    (2930, 50)
    """
    lengths = sorted(lengths)
    for i, length in enumerate(lengths):
        needed = math.ceil((tokens - sum(lengths[:i])) / (len(lengths) - i))
        if needed <= length:
            return needed
    return lengths[-1]
