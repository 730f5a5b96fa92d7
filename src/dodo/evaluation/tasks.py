"""The tasks: documents in, a method's work measured. Paper: Section 4 (autoencoding), Section 6.1 (SQuAD).

A task goes through its items in batches and can be stopped between them: what is done is kept in its record (see `record`).
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dodo.config import Use
from dodo.data.reading import Record, answers_field, naming, read_all, read_texts, resolve, text_field
from dodo.errors import InputError
from dodo.evaluation.methods import Held, Method
from dodo.evaluation.scoring import contains_answer, corpus_bleu, perplexity, rouge, sentence_bleu, share_error, share_rebuilt
from dodo.prompts import QUESTION, SUMMARY

__all__ = [
    "LENGTHS",
    "OF_LENGTHS",
    "TASKS",
    "Autoencoding",
    "Delimiters",
    "Item",
    "Multilingual",
    "Squad",
    "Summarization",
    "Task",
    "held_each",
    "kept_of",
    "windows",
]


LENGTHS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Item:
    """One thing to measure. key: unique in its task. group: what it is reported under. source: a hash of data that do not
    stand in it."""

    key: str
    document: str
    group: str
    question: str | None = None
    answers: tuple[str, ...] = ()
    source: str = ""


def hash_of(told: Any) -> str:
    """A short hash of something plain."""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


class Task:
    """What a method is asked to do with items, and what is made of its answers."""

    name: str
    use: Use = "text"
    """What documents are compressed for."""

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        """The items of the data, in a fixed random order, at most `limit` (of each group)."""
        raise NotImplementedError

    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        """What the method made of each item, as plain values, with `states` and `tokens`."""
        raise NotImplementedError

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Numbers, by group and over all."""
        raise NotImplementedError

    def each(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """By group, a number for each item, where a figure shows them; else nothing."""
        return {}


class Autoencoding(Task):
    """Rebuild texts of given lengths in tokens. BLEU by length (Figure 4); numbers, names and dates that came back; and, token by
    token with those before it given, perplexity and the share of tokens right."""

    name = "autoencoding"

    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        self.lengths, self._asked = tuple(lengths or LENGTHS), lengths is not None

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        texts = list(read_texts(sources))
        found: list[Item] = []
        for length in self.lengths:
            cut = windows(texts, tokenizer, length, np.random.default_rng((seed, length)), limit or len(texts))
            if self._asked and not cut:
                raise InputError(f"no text has {length} tokens; leave that --length out")
            found += [Item(f"{length}/{i}", text, f"{length} tokens") for i, text in enumerate(cut)]
        if not found:
            raise InputError(f"no text has {min(self.lengths)} tokens")
        return found

    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        documents = [item.document for item in batch]
        held = method.read(documents)
        found = zip(method.rebuild(held), method.forced(held, documents), kept_of(held), strict=True)
        return [
            {"text": text, "nats": forced.nats, "counted": forced.tokens, "right": forced.right, **kept}
            for text, forced, kept in found
        ]

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {group: self._group(mine, made) for group, mine in _grouped(items, made)}

    def each(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """BLEU of each text."""
        return {
            group: [round(sentence_bleu(made[item.key]["text"], item.document), 2) for item in mine]
            for group, mine in _grouped(items, made)
        }

    def _group(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        texts, wanted = [made[item.key]["text"] for item in items], [item.document for item in items]
        bleu, error = corpus_bleu(texts, wanted)
        exact = {f"{kind} rebuilt": share for kind, (share, _) in share_rebuilt(texts, wanted).items()}
        counts = {f"{kind} there": count for kind, (_, count) in share_rebuilt(texts, wanted).items()}
        nats, counted, right = ([made[item.key][name] for item in items] for name in ("nats", "counted", "right"))
        value, uncertain = perplexity(nats, counted)
        return {
            "n": len(items),
            "bleu": bleu,
            "bleu standard error": error,
            "token accuracy": sum(right) / sum(counted),
            "perplexity": value,
            "perplexity standard error": uncertain,
            **exact,
            **counts,
            **held_each(items, made),
        }


class Multilingual(Autoencoding):
    """Rebuild documents, cut after 512 tokens, of several languages, a file each: BLEU and perplexity. Table 6."""

    name = "multilingual"
    LONGEST = 512

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        found: list[Item] = []
        for source in resolve(sources):
            language = Path(source).name.split(".")[0]
            texts = list(read_texts([source]))
            for i in np.random.default_rng(seed).permutation(len(texts))[: limit or len(texts)]:
                ids = tokenizer(texts[i], add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
                cut = tokenizer.decode(ids[: self.LONGEST], clean_up_tokenization_spaces=False)
                found.append(Item(f"{language}/{i}", str(cut), language))
        if not found:
            raise InputError("there are no documents")
        return found


class Delimiters(Autoencoding):
    """Which kinds of tokens become nuggets, beside how often they stand in the texts. Figure 5."""

    name = "delimiters"
    SHOWN = 10

    def each(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """Nothing: no text is rebuilt."""
        return {}

    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        held = method.read([item.document for item in batch])
        chosen = method.selected(held)
        rows = []
        for item, ids, kept in zip(batch, chosen, kept_of(held), strict=True):
            counts = {"nuggets": Counter(method.tokens_of(ids)), "text": Counter(method.tokens_of(item.document))}
            rows.append({**counts, **kept})
        return rows

    def _group(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        nuggets: Counter[str] = Counter()
        text: Counter[str] = Counter()
        for item in items:
            nuggets.update(made[item.key]["nuggets"])
            text.update(made[item.key]["text"])
        most = nuggets.most_common(self.SHOWN)
        shares = {
            f"{token!r}: share of {what}": counts[token] / counts.total()
            for token, _ in most
            for what, counts in (("nuggets", nuggets), ("text", text))
        }
        covered = {f"most frequent {self.SHOWN}: share of nuggets": sum(count for _, count in most) / nuggets.total()}
        return {"n": len(items), "nuggets": nuggets.total(), **covered, **shares, **held_each(items, made)}


class Squad(Task):
    """Answer questions on paragraphs, up to 64 greedy tokens; right if an answer is contained. Table 3, Appendix E.

    Args:
        lengths: beyond the paper, each paragraph stands at random among others of the data, as many as make up so many tokens.
    """

    name = "squad"
    use: Use = "questions"

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self.lengths = tuple(lengths)

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        found: list[Item] = []
        for place, record in read_all(sources):
            with naming(place):
                if missing := {"context", "question", "answers"} - set(record):
                    there = ", ".join(sorted(record))
                    raise InputError(f"no field {sorted(missing)[0]!r}; context, question and answers are wanted, not {there}")
                context, question, answers = _filled(record, "context"), _filled(record, "question"), answers_field(record)
                if not answers:
                    raise InputError("no answer, and nothing said to it would be right; leave such questions out")
            found.append(Item(str(record.get("id") or len(found)), context, "all", question, answers))
        order = np.random.default_rng(seed).permutation(len(found))
        drawn = [found[i] for i in order]
        if self.lengths:
            among = Among([item.document for item in found], tokenizer)
            return [item for length in self.lengths for item in among.fitting(drawn, length, limit, seed)]
        return drawn[:limit]

    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        held = method.read([item.document for item in batch])
        made = method.reply(held, [QUESTION.format(question=(item.question or "").strip()) for item in batch], max_new_tokens=64)
        found = zip(batch, made, kept_of(held), strict=True)
        return [{"text": text, "right": contains_answer(text, item.answers), **kept} for item, text, kept in found]

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        found = {}
        for group, mine in _grouped(items, made):
            share = sum(made[item.key]["right"] for item in mine) / len(mine)
            found[group] = {
                "n": len(mine),
                "accuracy": share,
                "standard error": share_error(share, len(mine)),
                **held_each(mine, made),
            }
        return found

    def each(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """1 for each question answered, 0 for the others."""
        return {group: [int(made[item.key]["right"]) for item in mine] for group, mine in _grouped(items, made)}


class Summarization(Task):
    """Summarise articles in one sentence, up to 128 greedy tokens: ROUGE-1, 2 and L. Table 4."""

    name = "summarization"
    use: Use = "questions"

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        found: list[Item] = []
        for place, record in read_all(sources):
            with naming(place):
                article, highlights = _filled(record, "article"), _filled(record, "highlights")
            found.append(Item(str(record.get("id") or len(found)), article, "all", answers=(highlights,)))
        order = np.random.default_rng(seed).permutation(len(found))
        return [found[i] for i in order[: limit or len(order)]]

    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        held = method.read([item.document for item in batch])
        made = method.reply(held, [SUMMARY] * len(batch), max_new_tokens=128)
        found = zip(batch, made, kept_of(held), strict=True)
        return [{"text": text, **rouge(text, item.answers[0]), **kept} for item, text, kept in found]

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for group, mine in _grouped(items, made):
            found[group] = {"n": len(mine)}
            for name in ("rouge1", "rouge2", "rougeL"):
                values = [made[item.key][name] for item in mine]
                error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
                found[group] |= {name: float(np.mean(values)), f"{name} standard error": error}
            found[group] |= held_each(mine, made)
        return found

    def each(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """ROUGE-L of each summary."""
        return {group: [round(made[item.key]["rougeL"], 2) for item in mine] for group, mine in _grouped(items, made)}


class Among:
    """Paragraphs put among others of the same data.

    Args:
        paragraphs: of the data; one that stands there several times counts once.
        tokenizer: by which their tokens are counted.
    """

    MARGIN = 0.05
    """A document may lack this share of its tokens, or more where no other paragraph is so short."""

    def __init__(self, paragraphs: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._all, self._tokenizer = list(dict.fromkeys(paragraphs)), tokenizer
        self._counts: dict[str, int] = {}

    def fitting(self, items: Sequence[Item], length: int, limit: int | None, seed: int) -> list[Item]:
        """The first `limit` of the items whose documents fit in so many tokens, with others around them.

        Raises:
            InputError: none fits, or all others are too few.
        """
        fit = list(islice((item for item in items if self._tokens(item.document) <= length), limit))
        if not fit:
            raise InputError(f"no context fits in {length} tokens; leave that --length out")
        return [
            replace(
                item,
                key=f"{length}/{item.key}",
                document=self._document(item.document, length, (seed, length, i)),
                group=f"{length:,} tokens",
            )
            for i, item in enumerate(fit)
        ]

    def _document(self, paragraph: str, length: int, seed: tuple[int, ...]) -> str:
        rng = np.random.default_rng(seed)
        others, room, skipped = [], length - self._tokens(paragraph), False
        for other in (self._all[i] for i in rng.permutation(len(self._all))):
            if other == paragraph or room <= self.MARGIN * length:
                continue
            if self._tokens(other) <= room:
                others.append(other)
                room -= self._tokens(other)
            else:
                skipped = True
        if room > self.MARGIN * length and not skipped:
            raise InputError(f"the contexts of the data do not make up {length:,} tokens; leave that --length out")
        others.insert(int(rng.integers(len(others) + 1)), paragraph)
        return "\n\n".join(others)

    def _tokens(self, paragraph: str) -> int:
        """Of a paragraph and what parts it from the next one."""
        if paragraph not in self._counts:
            ids = self._tokenizer(f"{paragraph}\n\n", add_special_tokens=False, split_special_tokens=True, verbose=False)
            self._counts[paragraph] = len(ids["input_ids"])
        return self._counts[paragraph]


OF_LENGTHS: dict[str, type[Any]] = {task.name: task for task in (Autoencoding, Delimiters, Squad)}
"""Tasks on texts of lengths that can be given."""

TASKS: dict[str, type[Task]] = {**OF_LENGTHS, **{task.name: task for task in (Multilingual, Summarization)}}


def windows(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, rng: np.random.Generator, count: int
) -> list[str]:
    """Pieces of about `length` tokens, one of each of `count` random texts that are long enough, cut between tokens."""
    found: list[str] = []
    for i in rng.permutation(len(texts)):
        ids = tokenizer(texts[i], add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        if len(ids) < length:
            continue
        start = int(rng.integers(len(ids) - length + 1))
        found.append(str(tokenizer.decode(ids[start : start + length], clean_up_tokenization_spaces=False)))
        if len(found) == count:
            break
    return found


def _filled(record: Record, name: str) -> str:
    """A text field with something in it."""
    value = text_field(record, name)
    if not value.strip():
        raise InputError(f"the field {name!r} is empty")
    return value


def _grouped(items: Iterable[Item], made: dict[str, Any]) -> Iterator[tuple[str, list[Item]]]:
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        if item.key in made:
            groups[item.group].append(item)
    yield from groups.items()


def kept_of(held: Held) -> list[dict[str, Any]]:
    """Of each document its states, tokens and bytes, by name."""
    found = zip(held.states, held.tokens, held.nbytes, strict=True)
    return [{"states": states, "tokens": tokens, "bytes": nbytes} for states, tokens, nbytes in found]


def held_each(items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means of what is held, and the ratio achieved."""
    states, tokens, nbytes = (sum(made[item.key][name] for item in items) for name in ("states", "tokens", "bytes"))
    each = {f"{name} each": total / len(items) for name, total in (("tokens", tokens), ("states", states), ("bytes", nbytes))}
    return {**each, "ratio": tokens / states if states else None}
