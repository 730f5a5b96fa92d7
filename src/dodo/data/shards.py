"""Tokenised data on disk: one safetensors file that is mapped into memory, small enough to carry.

Two kinds. A *text* shard holds documents; a *question* shard holds documents and, for each, questions (as whole decoder
prompts) with answers. Ragged rows are one flat array and offsets.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from dodo.data.reading import Record, answers_field, naming, permits_commercial_use, read_all, text_field
from dodo.errors import InputError, first_line
from dodo.files import replacing
from dodo.fingerprint import of_tokenizer
from dodo.prompts import SUMMARY, question_prompt, request_prompt

__all__ = ["Ragged", "RecordKind", "Shard", "ShardKind", "prepare", "read_shard"]

ShardKind = Literal["text", "question"]
RecordKind = Literal["text", "question", "summary"]
VERSION = 1
Row = TypeVar("Row")
Taken = TypeVar("Taken")


class Asked(NamedTuple):
    """What is asked of a document, as a whole decoder prompt, and what is to come. Documents of one title are held back
    together."""

    document: str
    prompt: str
    answer: str
    title: str


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array: row i is flat[offsets[i]:offsets[i + 1]]."""

    flat: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.flat[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64, of each row."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Shard:
    """Tokenised documents and, in a question shard, their questions.

    documents: token ids without BOS. prompts, answers: one row per question, answers without EOS. owner: int64, the document
    of each question; questions of one document are neighbours. groups: int64, one number per document, the same for documents
    with the same `title` (an article's paragraphs), which are held back together.
    """

    kind: ShardKind
    documents: Ragged
    prompts: Ragged | None = None
    answers: Ragged | None = None
    owner: np.ndarray | None = None
    groups: np.ndarray | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    """When it was prepared, by reason: records of a licence, short documents, questions without an answer. Not stored."""

    def held_back(self, share: float, *, seed: int = 0) -> np.ndarray:
        """bool [documents], true for about `share` of the documents: whole groups, drawn at random, at least one of two.

        The same for the same shard, share and seed.
        """
        groups = np.arange(len(self.documents)) if self.groups is None else self.groups
        names, sizes = np.unique(groups, return_counts=True)
        order = np.random.default_rng(seed).permutation(len(names))
        before = np.cumsum(sizes[order]) - sizes[order]
        chosen = names[order[before < share * len(groups)]]
        return np.isin(groups, chosen if len(names) > 1 else names[:0])

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return int(self.documents.offsets[-1])


def prepare(
    sources: Sequence[str],
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: RecordKind = "text",
    commercial_only: bool = True,
    minimum: int = 16,
    tokens: int | None = None,
) -> Shard:
    """Read, filter and tokenise sources, and write them as one shard. Held in memory are the tokens, two or four bytes each.

    Args:
        sources: files, patterns or `hf:` ids; records with `text`; with `context`, `question` and `answer(s)`; or, for summaries,
            with `article` and `highlights`.
        out: a `.safetensors` file, written whole or not at all.
        kind: what the records are.
        commercial_only: leave out records whose licence field forbids commercial use.
        minimum: documents of fewer tokens are left out.
        tokens: stop with the document that completes so many; None: all. Texts after it are not read.

    Returns:
        The shard as it was written, mapped into memory.

    Raises:
        InputError: nothing is left, or a record lacks a field.
    """
    left_out: Counter[str] = Counter()

    def permitted(record: Record) -> bool:
        permits = not commercial_only or permits_commercial_use(record)
        left_out["not for commercial use (--any-licence, data.commercial_only)"] += not permits
        return permits

    def long_enough(ids: list[int]) -> bool:
        left_out[f"shorter than {minimum} tokens"] += len(ids) < minimum
        return len(ids) >= minimum

    def taken(take: Callable[[Record], Taken]) -> Iterator[Taken]:
        for place, record in read_all(sources):
            if permitted(record):
                with naming(place):
                    found = take(record)
                yield found

    if kind == "text":
        shard = _texts(taken(text_field), tokenizer, long_enough, tokens)
    else:
        what = _summary_in if kind == "summary" else _question_in
        shard = _asked(taken(lambda record: what(record, tokenizer)), tokenizer, long_enough, tokens, left_out)
    why = {reason: count for reason, count in left_out.items() if count}
    if len(shard.documents) == 0:
        told = "; ".join(f"{count:,} {reason}" for reason, count in why.items()) or "there are no records"
        raise InputError(f"no data left of {', '.join(sources)}: {told}")
    _write(shard, out, tokenizer, sources)
    return dataclasses.replace(read_shard(out), left_out=why)


def read_shard(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Shard:
    """Map a shard into memory.

    Raises:
        InputError: not a shard, or made with another tokenizer.
    """
    try:
        with safe_open(str(path), framework="pt") as file:  # which maps; as numpy arrays they would be copies
            about = json.loads((file.metadata() or {}).get("dodo_shard", "{}"))
            arrays: dict[str, np.ndarray] = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise InputError(f"{path} is not a tokenised shard: {error}") from None
    if about.get("version") != VERSION:
        raise InputError(f"{path} is not a tokenised shard of version {VERSION}; write it again with dodo prepare-data")
    if tokenizer is not None and about["tokenizer"] != of_tokenizer(tokenizer):
        raise InputError(f"{path} was tokenised for another base; write it again with dodo prepare-data")

    def ragged(name: str) -> Ragged | None:
        return Ragged(arrays[name], arrays[f"{name}.offsets"]) if name in arrays else None

    documents = ragged("documents")
    assert documents is not None
    return Shard(about["kind"], documents, ragged("prompts"), ragged("answers"), arrays.get("owner"), arrays.get("groups"))


def _encoded(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, literal: bool, size: int = 256) -> Iterator[list[int]]:
    """Token ids of many texts, in batches, which fast tokenizers like."""
    batch: list[str] = []

    def flush() -> list[list[int]]:
        ids: list[list[int]] = tokenizer(batch, add_special_tokens=False, split_special_tokens=literal, verbose=False)[
            "input_ids"
        ]
        return ids

    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield from flush()
            batch = []
    if batch:
        yield from flush()


def _texts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, keep: Callable[[list[int]], bool], tokens: int | None
) -> Shard:
    kept = (ids for ids in _encoded(texts, tokenizer, literal=True) if keep(ids))
    return Shard("text", _pack(_enough(kept, len, tokens), tokenizer))


def _enough(rows: Iterable[Row], length: Callable[[Row], int], tokens: int | None) -> Iterator[Row]:
    """Rows until they have so many tokens."""
    seen = 0
    for row in rows:
        yield row
        seen += length(row)
        if tokens is not None and seen >= tokens:
            return


def _question_in(record: Record, tokenizer: PreTrainedTokenizerBase) -> Asked | None:
    """Paper: Appendix D.2."""
    context, question, answers = text_field(record, "context"), text_field(record, "question"), answers_field(record)
    if not {"answers", "answer"} & set(record):
        raise InputError(f"a record has no field 'answers' or 'answer'; its fields are {', '.join(sorted(record))}")
    if not answers or not answers[0].strip():
        return None
    title = str(record.get("title") or context)
    return Asked(context, question_prompt(tokenizer, question), answers[0].strip(), title)


def _summary_in(record: Record, tokenizer: PreTrainedTokenizerBase) -> Asked | None:
    """Of an article, and its highlights. Paper: Appendix D.3."""
    article, highlights = text_field(record, "article"), text_field(record, "highlights").strip()
    title = str(record.get("title") or article)
    return Asked(article, request_prompt(tokenizer, SUMMARY), highlights, title) if highlights else None


def _asked(
    records: Iterable[Asked | None],
    tokenizer: PreTrainedTokenizerBase,
    keep: Callable[[list[int]], bool],
    tokens: int | None,
    left_out: Counter[str],
) -> Shard:
    """Documents, each once, what is asked of them, and what is to come."""
    grouped: dict[str, list[tuple[str, str]]] = {}
    titles: dict[str, str] = {}
    for found in records:
        left_out["without an answer"] += found is None
        if found is not None:
            grouped.setdefault(found.document, []).append((found.prompt, found.answer))
            titles.setdefault(found.document, found.title)
    rows = zip(_encoded(grouped, tokenizer, literal=True), grouped.values(), titles.values(), strict=True)
    kept = [*_enough((row for row in rows if keep(row[0])), lambda row: len(row[0]), tokens)]
    prompts = _encoded((prompt for _, pairs, _ in kept for prompt, _ in pairs), tokenizer, literal=False)
    answers_ids = _encoded((a for _, pairs, _ in kept for _, a in pairs), tokenizer, literal=True)
    owner = np.repeat(np.arange(len(kept)), [len(pairs) for _, pairs, _ in kept]) if kept else np.zeros(0, np.int64)
    numbers: dict[str, int] = {}
    groups = np.asarray([numbers.setdefault(title, len(numbers)) for _, _, title in kept], np.int64)
    return Shard(
        "question",
        _pack((ids for ids, _, _ in kept), tokenizer),
        _pack(prompts, tokenizer),
        _pack(answers_ids, tokenizer),
        owner.astype(np.int64),
        groups,
    )


def _pack(rows: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase) -> Ragged:
    width = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    packed = [np.asarray(row, width) for row in rows]
    offsets = np.zeros(len(packed) + 1, np.int64)
    np.cumsum([len(row) for row in packed], out=offsets[1:])
    return Ragged(np.concatenate(packed) if packed else np.zeros(0, width), offsets)


def _write(shard: Shard, out: Path, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name in ("documents", "prompts", "answers"):
        rows: Ragged | None = getattr(shard, name)
        if rows is not None:
            arrays |= {name: rows.flat, f"{name}.offsets": rows.offsets}
    arrays |= {name: getattr(shard, name) for name in ("owner", "groups") if getattr(shard, name) is not None}
    about = {"version": VERSION, "kind": shard.kind, "tokenizer": of_tokenizer(tokenizer), "sources": list(sources)}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as part:  # processes that start together prepare the same
            save_file(arrays, part, metadata={"dodo_shard": json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise InputError(f"could not write {out}: {first_line(error)}; nothing was changed") from None
