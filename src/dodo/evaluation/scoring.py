"""From texts to numbers: what counts as an answer, how much of a text came back. Paper: Section 4, Appendix E."""

import functools
import importlib.util
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dodo.errors import InputError

__all__ = [
    "check_installed",
    "contains_answer",
    "corpus_bleu",
    "normalized",
    "perplexity",
    "rouge",
    "sentence_bleu",
    "share_error",
    "share_rebuilt",
]

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_UPPER, _LOWER = ("".join(c for c in map(chr, range(0x3000)) if kind(c)) for kind in (str.isupper, str.islower))
"""Letters of Latin, Greek, Cyrillic and the other scripts that have two cases."""
KINDS: dict[str, str] = {
    "numbers": r"\d+(?:[.,]\d+)*",
    "names": rf"(?<=[{_LOWER}0-9,;:)] )[{_UPPER}][{_LOWER}]+(?: [{_UPPER}][{_LOWER}]+)*",
    "dates": rf"\b(?:\d{{1,2}} )?(?:{_MONTHS})\b(?: \d{{1,2}}\b,?)?(?: \d{{4}}\b)?|\b(?:1\d|20)\d{{2}}\b(?![.,]\d)",
}
"""Exact things of a text: numbers; capitalised words inside a sentence, neighbours together; years, and dates with a month
in English."""


def check_installed() -> None:
    """Raise InputError, before anything is computed, if a package is missing that values are computed with."""
    for name in ("sacrebleu", "rouge_score", "text_to_num"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"evaluating needs {name}: pip install 'dodo-lm[evaluate]'")


def normalized(text: str) -> str:
    """Number words as digits, punctuation as spaces, no space around, lower case. Paper: Appendix E.

    >>> normalized(" Twenty-one dodos, at most! ")
    '21 dodos at most'
    """
    from text_to_num import alpha2digit

    text = alpha2digit(text.lower(), "en", 0)
    return " ".join(re.sub(r"[^\w\s]|_", " ", text).split())


def contains_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether one of the right answers stands in the text, both normalised. Paper: Appendix E."""
    made = normalized(text)
    return any(wanted in made for wanted in map(normalized, answers) if wanted)


def share_error(share: float, n: int) -> float | None:
    """Standard error of a share of n; None of nothing."""
    return math.sqrt(share * (1 - share) / n) if n else None


def corpus_bleu(made: Sequence[str], wanted: Sequence[str], *, groups: int = 10) -> tuple[float, float | None]:
    """Corpus BLEU (sacrebleu, 13a, 0 to 100) and its standard error by a jackknife over groups of texts (None for one text)."""
    import sacrebleu

    def score(pairs: Sequence[tuple[str, str]]) -> float:
        return float(sacrebleu.corpus_bleu([m for m, _ in pairs], [[w for _, w in pairs]]).score)

    pairs = list(zip(made, wanted, strict=True))
    return score(pairs), _jackknife(score, pairs, min(groups, len(pairs)))


def sentence_bleu(made: str, wanted: str) -> float:
    """BLEU of one text (sacrebleu, 13a, effective order, 0 to 100)."""
    import sacrebleu

    return float(sacrebleu.sentence_bleu(made, [wanted]).score)


def rouge(made: str, wanted: str) -> dict[str, float]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L (rouge-score, stemmed, 0 to 100). Paper: Table 4."""
    found = _rouge_scorer().score(wanted, made)
    return {name: 100 * float(score.fmeasure) for name, score in found.items()}


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def perplexity(nats: Sequence[float], counts: Sequence[float]) -> tuple[float | None, float | None]:
    """exp of the mean nats over all texts, and its standard error by a jackknife over texts (None of nothing, and for one text).

    None too where it is beyond all numbers, as of "words" that are whole sentences in a language that writes no spaces.

    Args:
        nats: of each text, summed over what is counted.
        counts: subwords or words of each text, or parts of them; texts of none are left out.

    >>> perplexity([0.0, 0.0], [3, 1])
    (1.0, 0.0)
    """
    pairs = [(n, count) for n, count in zip(nats, counts, strict=True) if count]
    if not pairs:
        return None, None
    all_nats, all_counts = (sum(column) for column in zip(*pairs, strict=True))
    try:
        value = math.exp(all_nats / all_counts)
        if len(pairs) < 2:
            return value, None
        return value, _spread([math.exp((all_nats - n) / (all_counts - count)) for n, count in pairs])
    except OverflowError:
        return None, None


def _jackknife(score: Callable[[Sequence[Any]], float], pairs: Sequence[Any], groups: int) -> float | None:
    if groups < 2:
        return None
    without = [score([pair for i, pair in enumerate(pairs) if i % groups != group]) for group in range(groups)]
    return _spread(without)


def _spread(without: Sequence[float]) -> float:
    """The jackknife's standard error, from a value without each group in turn."""
    return math.sqrt((len(without) - 1) * statistics.pvariance(without))


def share_rebuilt(made: Sequence[str], wanted: Sequence[str]) -> dict[str, tuple[float | None, int]]:
    """Of each kind of exact thing in the wanted texts: the share that stands in the made ones (None of
    none), and how many there are."""
    found: dict[str, tuple[float | None, int]] = {}
    for kind, pattern in KINDS.items():
        here = there = 0
        for m, w in zip(made, wanted, strict=True):
            things = Counter(re.findall(pattern, w))
            there += sum(things.values())
            here += sum((things & Counter(re.findall(pattern, m))).values())
        found[kind] = (here / there if there else None, there)
    return found
