"""Which tokens come in which batch: a function of the seed and the batch's number, and of nothing else.

So a run that is taken up again in the middle goes on with exactly the batches it would have had, on however many processes.
Windows are drawn uniformly over all tokens, with replacement. All rows of a text batch have one length: there is no padding;
the questions of a batch are of neighbouring lengths.

Shapes: B texts, T document tokens, M decoder tokens.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dodo.data.shards import Ragged, Shard
from dodo.errors import InputError

__all__ = ["Batch", "Draw", "Objective", "QuestionSource", "TextSource", "draw_skewed"]

Objective = Literal["autoencoding", "recall", "continuation", "question", "distillation", "autoregressive"]


@dataclass  # not frozen: Lightning's DeepSpeed refuses to pass on a frozen one
class Batch:
    """What one forward and backward pass needs.

    documents: int64 [B, T], padded on the right. document_mask: bool [B, T].
    decoder: int64 [B, M], what the decoder reads, padded on the right (without the soft token).
    targets: int64 [B, M], the token that follows each of `decoder`; with a soft token [B, M + 1]; -100 where there is no loss.
        Of an autoregressive batch [B, T], the token that follows each of `documents`; nothing stands in `decoder`.
    rows: int64 [B'], the document of each decoder row, where one document has several questions; None: one each.
    number: in the run.
    window, segment: of an autoregressive batch, in tokens: see `Autoregressive`.
    nuggets: of an autoregressive batch, held at most, the latest; None: all.
    divisor: what the sum of its losses is divided by; None: the number of its own tokens with a loss.
    """

    objective: Objective
    ratio: float
    documents: Tensor
    document_mask: Tensor
    decoder: Tensor
    decoder_mask: Tensor
    targets: Tensor
    rows: Tensor | None = None
    number: int = 0
    window: int = 1
    segment: int = 1
    nuggets: int | None = None
    divisor: float | None = None

    @property
    def loss_tokens(self) -> int:
        """Tokens with a loss."""
        return int((self.targets != -100).sum())

    @property
    def document_tokens(self) -> int:
        """Tokens compressed, padding not counted."""
        return int(self.document_mask.sum())

    def to(self, device: torch.device | str, **_: object) -> "Batch":
        """The same batch on a device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Draw:
    """A number drawn per batch between two bounds, most often near `mode`, on a logarithmic scale."""

    low: float
    high: float
    mode: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.mode <= self.high:
            raise InputError(f"0 < low <= mode <= high is wanted, not low={self.low}, mode={self.mode}, high={self.high}")


def draw_skewed(draw: Draw, rng: np.random.Generator) -> float:
    """Triangular in the logarithm."""
    if draw.low == draw.high:
        return draw.low
    return math.exp(rng.triangular(math.log(draw.low), math.log(draw.mode), math.log(draw.high)))


class TextSource:
    """Windows of documents, each drawn with a probability proportional to its tokens.

    Args:
        shards: of kind text.
        bos: put in front of each window, or None.
        eos: the target after a reconstruction.
    """

    def __init__(self, shards: Sequence[Shard], *, bos: int | None, eos: int) -> None:
        if not shards or sum(len(s.documents) for s in shards) == 0:
            raise InputError("no text to train on: the shards hold no documents")
        self._rows: list[Ragged] = [s.documents for s in shards]
        self._bos, self._eos = bos, eos
        lengths = np.concatenate([rows.lengths for rows in self._rows])
        self._ends = np.cumsum(lengths)
        self._lengths = lengths
        self._starts = np.cumsum([0, *(len(rows) for rows in self._rows)])

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self._lengths.max())

    @property
    def usual(self) -> int:
        """The most tokens that documents with a tenth of all tokens have: longer windows would be drawn from few documents."""
        lengths = np.sort(self._lengths)[::-1]
        within = np.searchsorted(np.cumsum(lengths), 0.1 * self._ends[-1])
        return int(lengths[within])

    def _document(self, i: int) -> np.ndarray:
        shard = int(np.searchsorted(self._starts, i, side="right")) - 1
        return self._rows[shard][i - int(self._starts[shard])]

    def windows(self, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [count, length]; shorter documents are passed over."""
        found: list[np.ndarray] = []
        if length > self.longest:
            raise InputError(f"no document has {length} tokens; the longest has {self.longest}")
        while len(found) < count:
            i = int(np.searchsorted(self._ends, rng.integers(self._ends[-1]), side="right"))
            spare = int(self._lengths[i]) - length
            if spare >= 0:
                start = 0 if rng.random() < 0.1 else int(rng.integers(spare + 1))
                found.append(self._document(i)[start : start + length])
        return np.stack(found).astype(np.int64)

    def _documents(self, windows: np.ndarray) -> Tensor:
        ids = torch.from_numpy(windows)
        if self._bos is None:
            return ids
        return torch.cat([torch.full((len(ids), 1), self._bos), ids], dim=1)

    def autoencoding(self, count: int, length: int, ratio: float, rng: np.random.Generator) -> Batch:
        """Texts to be rebuilt: soft token, text, EOS. Paper: Section 4."""
        text = torch.from_numpy(self.windows(count, length, rng))
        documents = self._documents(text.numpy())
        targets = torch.cat([text, torch.full((count, 1), self._eos)], dim=1)
        return _full("autoencoding", ratio, documents, text, targets)

    def recall(
        self, count: int, length: int, ratio: float, rng: np.random.Generator, *, cue: int = 8, following: int = 64
    ) -> Batch:
        """Texts of which a stretch is to be told from anywhere, given the `cue` tokens before it: finding, not only rebuilding.

        Beyond the paper. The cue lies in the document, so that the decoder has to look for it among the nuggets.
        """
        text = self.windows(count, length, rng)
        cue = min(cue, length // 2)
        following = min(following, length - cue)
        starts = rng.integers(length - cue - following + 1, size=(count, 1))
        parts = torch.from_numpy(np.take_along_axis(text, starts + np.arange(cue + following), axis=1))
        targets = parts[:, 1:].clone()
        targets[:, : cue - 1] = -100
        return _full("recall", ratio, self._documents(text), parts[:, :-1], targets)

    def continuation(
        self, count: int, length: int, following: int, ratio: float, rng: np.random.Generator, *, distil: bool = False
    ) -> Batch:
        """Texts to be continued: the decoder reads on from token n; its first token is given. Paper: Section 6 (zero-shot)."""
        text = self.windows(count, length + following, rng)
        after = torch.from_numpy(text[:, length:])
        documents = self._documents(text[:, :length])
        return _full("distillation" if distil else "continuation", ratio, documents, after[:, :-1], after[:, 1:])

    def autoregressive(
        self,
        count: int,
        length: int,
        ratio: float,
        rng: np.random.Generator,
        *,
        window: int,
        segment: int,
        nuggets: int | None = None,
    ) -> Batch:
        """Texts of which every token is predicted, from nuggets and the `window` tokens before its segment. Paper: Eq. 11."""
        text = self.windows(count, min(length + 1 - (self._bos is not None), max(length, self.usual)), rng)
        documents = self._documents(text)
        nothing = documents[:, :0]
        batch = _full("autoregressive", ratio, documents[:, :-1], nothing, documents[:, 1:])
        return dataclasses.replace(batch, window=window, segment=segment, nuggets=nuggets)


def _full(objective: Objective, ratio: float, documents: Tensor, decoder: Tensor, targets: Tensor) -> Batch:
    return Batch(
        objective=objective,
        ratio=ratio,
        documents=documents,
        document_mask=torch.ones_like(documents, dtype=torch.bool),
        decoder=decoder,
        decoder_mask=torch.ones_like(decoder, dtype=torch.bool),
        targets=targets,
    )


class QuestionSource:
    """Documents with questions, sorted by length so that a batch has little padding.

    Args:
        shard: of kind question.
        bos, eos: as for `TextSource`.
        longest: documents of more tokens are left out.
        documents: bool, which of the shard's documents to use; None: all.
        between: what stands between paragraphs that are made one document.

    Attributes:
        left_out: documents with questions that are longer.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        bos: int | None,
        eos: int,
        longest: int = 512,
        documents: np.ndarray | None = None,
        between: Sequence[int] = (),
    ) -> None:
        if shard.prompts is None or shard.answers is None or shard.owner is None:
            raise InputError("not a question shard: it has no prompts and answers")
        self._shard, self._bos, self._eos, self._between = shard, bos, eos, list(between)
        self._first = np.searchsorted(shard.owner, np.arange(len(shard.documents) + 1))
        lengths = shard.documents.lengths
        asked = self._first[:-1] < self._first[1:]
        if documents is not None:
            asked &= documents
        usable = asked & (lengths <= longest)
        self.left_out = int((asked & ~usable).sum())
        if not usable.any():
            raise InputError(f"no questions to train on: no document of at most {longest} tokens has one")
        chosen = usable.nonzero()[0]
        self._order = chosen[np.argsort(lengths[chosen], kind="stable")]

    def __len__(self) -> int:
        return len(self._order)

    def positions(self, among: int = 0) -> int:
        """Of the longest document, alone or among others, with the longest prompt and answer, at most."""
        assert self._shard.prompts is not None and self._shard.answers is not None
        behind = self._shard.prompts.lengths + self._shard.answers.lengths
        longest = max(among, int(self._shard.documents.lengths[self._order].max()))
        return longest + int(behind.max()) + (self._bos is not None)

    @property
    def median(self) -> int:
        """Tokens of the document in the middle of the order of lengths."""
        return int(self._shard.documents.lengths[self._order[len(self._order) // 2]])

    @property
    def most(self) -> int:
        """Questions to one document."""
        return int(np.diff(self._first)[self._order].max())

    def batch(
        self, tokens: int, per_document: int, ratio: float, rng: np.random.Generator, *, at: int | None = None, among: int = 0
    ) -> Batch:
        """Neighbouring documents of about `tokens` tokens in all, with up to `per_document` questions each. Paper: Section 6.1.

        `at` says which in the order of lengths; None draws it. Each stands among others, in a random place, where that makes no
        more than `among` tokens; the questions are then about any of them.
        """
        lengths = self._shard.documents.lengths
        at = int(rng.integers(len(self._order))) if at is None else at
        count = max(1, tokens // max(among, int(lengths[self._order[at]])))
        chosen = self._order[max(0, min(at, len(self._order) - count)) :][:count]
        documents, decoders, targets, rows = [], [], [], []
        for row, i in enumerate(chosen):
            paragraphs = self._among_others(i, among, rng) if among else [i]
            ids = self._shard.documents[paragraphs[0]].tolist()
            for other in paragraphs[1:]:
                ids += [*self._between, *self._shard.documents[other].tolist()]
            documents.append(ids if self._bos is None else [self._bos, *ids])
            mine = np.concatenate([np.arange(self._first[one], self._first[one + 1]) for one in paragraphs])
            for q in rng.permutation(mine)[:per_document]:
                assert self._shard.prompts is not None and self._shard.answers is not None
                prompt, answer = self._shard.prompts[q].tolist(), self._shard.answers[q].tolist()
                decoders.append([*prompt, *answer])
                targets.append([-100] * (len(prompt) - 1) + [*answer, self._eos])
                rows.append(row)
        document_ids, document_mask = _padded(documents, 0)
        decoder, decoder_mask = _padded(decoders, 0)
        return Batch(
            objective="question",
            ratio=ratio,
            documents=document_ids,
            document_mask=document_mask,
            decoder=decoder,
            decoder_mask=decoder_mask,
            targets=_padded(targets, -100)[0],
            rows=torch.tensor(rows),
        )

    def _among_others(self, document: int, tokens: int, rng: np.random.Generator) -> list[int]:
        """The document and others, drawn until the next would make more than so many tokens."""
        lengths, found = self._shard.documents.lengths, [document]
        room = tokens - int(lengths[document])
        for other in self._order[rng.integers(len(self._order), size=max(0, room))]:
            if other in found:
                continue
            room -= int(lengths[other]) + len(self._between)
            if room < 0:
                break
            found.append(int(other))
        return [found[place] for place in rng.permutation(len(found))]


def _padded(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), filler)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask
