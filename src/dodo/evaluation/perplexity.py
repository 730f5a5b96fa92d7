"""Perplexity with a bounded number of states. Paper: Section 5, Table 1; docs/decisions/0010 says what the paper leaves open.

A text is scored in segments of M tokens. Before each segment, each method holds S states (`language_models`): Full the last S
tokens; Dodo and Compressive the last tau tokens whole, half of S in the paper, and S - tau compressed states of the r (S - tau)
tokens before. All of it is read afresh from that stretch of the text, so nothing older plays a part. Within a segment its own
earlier tokens are seen in addition, by every method alike, and with `keep_first` the text's first token. So each token is
predicted from as many states by every method.

Each token of a text is scored once (the first only if a BOS token stands before it). At a text's beginning there is less to
hold: segments with less than (r + 1) S / 2 tokens before them count in the numbers marked "all" and not in the others, whatever
the method; where tau is less than half of S, those with less than r (S - tau) + tau.

Words are what white space separates; their subwords' nats are added up, those of the white space before a word among them. Of a
word at the edge of what is scored, the tokens within count as that share of a word: leaving it out would leave out long words.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dodo.architecture import state_bytes
from dodo.data.reading import read_texts, resolve
from dodo.errors import InputError
from dodo.evaluation.language_models import LanguageModel, history_of, whole_of
from dodo.evaluation.scoring import perplexity
from dodo.evaluation.tasks import Item, hash_of
from dodo.model import Dodo

__all__ = ["STATES", "Perplexity", "Segment", "articles", "words_of"]

STATES = (64, 128, 256)
OUT_OF_VOCABULARY = "<unk>"
_TITLE = re.compile(r"(?<=\n \n) = [^=\n]+ = \n(?= \n)")


@dataclass(frozen=True)
class Segment(Item):
    """A segment to be scored. text: which. start: of the segment in the text, in tokens. states: S."""

    text: int = 0
    start: int = 0
    states: int = 0


@dataclass(frozen=True, eq=False)
class _Text:
    """ids: int64 [N]. words: int64 [N], of each token, or -1 for none. counted: bool [W], words of the vocabulary."""

    ids: np.ndarray
    words: np.ndarray
    counted: np.ndarray


class Perplexity:
    """See above.

    Args:
        dodo: whose tokenizer reads the texts, and whose base has the window.
        states: S.
        segment: M.
        ratio: r, a whole number.
        share: tau / S.

    Raises:
        InputError: a setting is out of range, or what a method reads does not fit the base's window.
    """

    name = "perplexity"

    def __init__(
        self, dodo: Dodo, *, states: Sequence[int] = STATES, segment: int = 16, ratio: float = 10, share: float = 0.5
    ) -> None:
        if segment < 1:
            raise InputError(f"a segment must be at least 1 token, not {segment}")
        for count in states:
            whole, made_of = whole_of(count, share), history_of(count, share, ratio)
            needed, window = made_of + 1 + segment, dodo.compressor.window // segment * segment
            if needed > window or whole + segment > dodo.compressor.window // 2:
                raise InputError(
                    f"{count} states at ratio {ratio:g} are made of {needed:,} tokens with a segment of {segment}; "
                    f"the base's window has room for {window:,} in whole segments, half of it for the {whole} whole ones"
                )
        self.dodo, self.states, self.segment, self.ratio, self.share = dodo, tuple(dict.fromkeys(states)), segment, ratio, share
        self._first = int(dodo.config.keep_first)
        self._texts: list[_Text] = []

    @property
    def whole_from(self) -> list[int]:
        """Where in a text segments with a whole history begin, in tokens, for each S."""
        return [self._whole(S) for S in self.states]

    def items(self, sources: Sequence[str], limit: int | None, seed: int) -> list[Segment]:
        """The segments of all texts, or some drawn from all over them, of about `limit` tokens; by states, then length."""
        self._texts = [_read(self.dodo, *text) for source in resolve(sources) for text in _texts_of(source)]
        starts = [(i, start) for i, text in enumerate(self._texts) for start in range(0, len(text.ids) - 1, self.segment)]
        if limit is not None:
            left, drawn = limit, np.random.default_rng(seed).permutation(len(starts))
            here = [starts[i] for i in drawn]
            starts = []
            while left > 0 and len(starts) < len(here):
                text, start = here[len(starts)]
                starts.append((text, start))
                left -= min(self.segment, len(self._texts[text].ids) - 1 - start)
        if not starts:
            raise InputError("there is no text of two tokens or more")
        sources_of = [hash_of(text.ids.tolist()) for text in self._texts]
        return [
            Segment(f"{S}/{text}/{start}", "", f"{S} states", source=sources_of[text], text=text, start=start, states=S)
            for S in self.states
            for text, start in sorted(starts, key=lambda place: (min(place[1], self._whole(S)), place))
        ]

    def run(self, method: LanguageModel, batch: Sequence[Segment]) -> list[dict[str, Any]]:
        """Nats of each token of each segment, and the states held before it. Rows of one length are read together."""
        made: dict[str, dict[str, Any]] = {}
        shapes: dict[tuple[int, int], list[Segment]] = defaultdict(list)
        rows = {item.key: self._row(item, method.history(item.states)) for item in batch}
        for item in batch:
            shapes[item.states, len(rows[item.key])].append(item)
        for (states, _), items in shapes.items():
            targets = [self._padded(self._texts[item.text].ids[item.start + 1 :]) for item in items]
            found = method.score(self._tensor([rows[item.key] for item in items]), self._tensor(targets), states)
            for item, nats, held in zip(items, found.nats.tolist(), found.states.tolist(), strict=True):
                real = min(self.segment, len(self._texts[item.text].ids) - 1 - item.start)
                made[item.key] = {"nats": [round(n, 5) for n in nats[:real]], "states": held}
        return [made[item.key] for item in batch]

    def each(self, items: Sequence[Segment], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """For each S: nats per counted subword of each segment with a whole history, in the order of the texts."""
        found: dict[str, list[float]] = {f"{S} states": [] for S in self.states}
        for item, nats in self._counted(items, made):
            found[item.group].append(round(float(nats.mean()), 5))
        return found

    def each_of(self, items: Sequence[Segment], made: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
        """For each S: which text each of those segments is of."""
        found: dict[str, list[int]] = {f"{S} states": [] for S in self.states}
        for item, _ in self._counted(items, made):
            found[item.group].append(item.text)
        return found

    def _counted(self, items: Sequence[Segment], made: dict[str, dict[str, Any]]) -> Iterator[tuple[Segment, np.ndarray]]:
        for item in sorted(items, key=lambda item: (item.text, item.start)):
            text, nats = self._texts[item.text], np.array(made[item.key]["nats"])
            some = slice(item.start + 1, item.start + 1 + len(nats))
            counted = np.append(text.counted, True)[text.words[some]]
            if item.start >= self._whole(item.states) and counted.any():
                yield item, nats[counted]

    def measure(self, items: Sequence[Segment], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """For each S: perplexities of segments with a whole history, and of all."""
        found = {}
        for S in self.states:
            mine = [item for item in items if item.states == S and item.key in made]
            whole = [item for item in mine if item.start >= self._whole(S)]
            numbers = {f"{name}, all": value for name, value in self._numbers(mine, made).items()}
            found[f"{S} states"] = self._numbers(whole, made) | numbers
        return found

    def _whole(self, states: int) -> int:
        """Where in a text segments begin to have a whole history, for every method."""
        return self._first + max(int((self.ratio + 1) * states // 2), history_of(states, self.share, self.ratio))

    def _row(self, item: Segment, history: int) -> np.ndarray:
        """Kept first token, history, segment; filled on the right, where causal attention never sees it."""
        ids, start = self._texts[item.text].ids, item.start
        first = min(self._first, start)
        before = ids[max(first, start - history) : start]
        return np.concatenate([ids[:first], before, self._padded(ids[start:])])

    def _tensor(self, rows: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(rows)).to(self.dodo.device)

    def _padded(self, ids: np.ndarray) -> np.ndarray:
        return np.pad(ids[: self.segment], (0, max(0, self.segment - len(ids))))

    def _numbers(self, items: Iterable[Segment], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        nats = [np.full(len(text.ids), np.nan) for text in self._texts]
        states = []
        for item in items:
            here = made[item.key]["nats"]
            nats[item.text][item.start + 1 : item.start + 1 + len(here)] = here
            states.append(made[item.key]["states"])
        subwords = [_subwords(text, some) for text, some in zip(self._texts, nats, strict=True)]
        words = [_words(text, some) for text, some in zip(self._texts, nats, strict=True)]
        each = float(np.mean(states)) if states else None
        config, width = self.dodo.compressor.base.config, self.dodo.compressor.base.dtype.itemsize
        held = None if each is None else each * state_bytes(config, bytes_per_number=width)
        numbers: dict[str, Any] = {"states each": each, "bytes each": held}
        for name, pairs in (("subword", subwords), ("word", words)):
            value, error = perplexity([n for n, _ in pairs], [count for _, count in pairs])
            numbers |= {f"{name}s": sum(count for _, count in pairs), f"{name} perplexity": value}
            numbers[f"{name} perplexity standard error"] = error
        return numbers | {"texts": sum(count > 0 for _, count in subwords)}


def articles(text: str) -> list[str]:
    """The articles of a WikiText file, each from its title (` = Title = ` between empty lines) on.

    >>> articles(" \\n = A = \\n \\n One . \\n \\n = = B = = \\n \\n Two . \\n \\n = C = \\n \\n Three . \\n")
    [' = A = \\n \\n One . \\n \\n = = B = = \\n \\n Two . \\n \\n', ' = C = \\n \\n Three . \\n']
    """
    starts = [match.start() - 1 for match in _TITLE.finditer("\n" + text)]
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *starts, len(text)])]
    return [piece for piece in pieces if piece.strip()]


def words_of(text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, list[str]]:
    """The word of each token, and the words.

    A token is part of the word that its last character is of; white space is part of the word behind it, -1 at the end.

    >>> words_of("a dodo \\n", [(0, 1), (1, 4), (4, 6), (6, 8)])
    (array([ 0,  1,  1, -1]), ['a', 'dodo'])
    """
    found = list(re.finditer(r"\S+", text))
    ends = [match.end() for match in found]
    last = [max(begin, begin + len(text[begin:end].rstrip()) - 1) if text[begin:end].strip() else end for begin, end in spans]
    words = np.searchsorted(ends, last, side="right")
    return np.where(words < len(found), words, -1), [match.group() for match in found]


def _texts_of(source: str) -> list[tuple[str, bool]]:
    """Texts that are not empty, and whether `<unk>` stands for a word out of the vocabulary in them, as in all of WikiText."""
    texts = [text for text in read_texts([source]) if text]
    name = source.casefold()
    if not name.endswith(".tokens"):
        return [(text, "wikitext" in name) for text in texts]
    return [(article, True) for text in texts for article in articles(text)]


def _read(dodo: Dodo, text: str, unknown: bool) -> _Text:
    if not dodo.tokenizer.is_fast:
        raise InputError("perplexity by words needs a fast tokenizer, which knows where its tokens lie in the text")
    ids = dodo.document_ids(text)
    made = dodo.tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False)
    in_front = len(ids) - len(made["input_ids"])
    words, names = words_of(text, made["offset_mapping"])
    counted = np.array([not (unknown and name == OUT_OF_VOCABULARY) for name in names], dtype=bool)
    return _Text(np.array(ids), np.concatenate([np.full(in_front, -1), words]), counted)


def _subwords(text: _Text, nats: np.ndarray) -> tuple[float, int]:
    """Sum and count of scored tokens; those of words out of the vocabulary are left out."""
    counted = np.append(text.counted, True)[text.words]  # -1, no word: counted
    scored = counted & ~np.isnan(nats)
    return float(nats[scored].sum()), int(scored.sum())


def _words(text: _Text, nats: np.ndarray) -> tuple[float, float]:
    """Sum and count of words, one of which some tokens are scored by their share; those out of the vocabulary are left out."""
    inside = text.words >= 0
    scored = inside & ~np.isnan(nats) & np.append(text.counted, True)[text.words]
    tokens, found = (np.bincount(text.words[some], minlength=len(text.counted)) for some in (inside, scored))
    return float(nats[scored].sum()), float((found / tokens.clip(1)).sum())
