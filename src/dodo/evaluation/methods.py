"""Ways to hold a document: compressed by Dodo, in ICAE's memory, whole, summarised, cut off, or not at all.

Paper: Section 4.1 (ICAE), Section 6 (the others). A method reads documents, and then writes text after them. What it holds
between the two is counted in states: positions with keys and values in every layer; of ICAE memory slots, which become such
positions when they are decoded.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dodo.adapters import THETA, AdapterName
from dodo.architecture import logits_of, state_bytes
from dodo.config import Use
from dodo.errors import InputError, WindowError
from dodo.evaluation.names import PEERS
from dodo.generation import generated, generation_settings, pad_rows, until_end
from dodo.icae import Icae
from dodo.model import Dodo
from dodo.nuggets import Nuggets
from dodo.prompts import SHORTEN, opening_turn, request_prompt
from dodo.selection import count_nuggets, stride

__all__ = [
    "METHODS",
    "Compressed",
    "Forced",
    "Held",
    "Memorized",
    "Method",
    "Summarized",
    "Tuned",
    "Whole",
    "make_method",
    "own_ids",
    "states_of",
]

Choice = Literal["scorer", "stride", "random"]


@dataclass(frozen=True)
class Held:
    """Documents as a method holds them.

    states: of each document; not whole where heads hold different numbers. tokens: of each document. what: the method's own.
    nbytes: of each document's states, padding left out; of a text that the base reads, those of its whole cache.
    """

    states: Sequence[float]
    tokens: list[int]
    what: Any
    nbytes: Sequence[float]


class Forced(NamedTuple):
    """A document rebuilt token by token. nats: sum of -log p; tokens: how many; right: how many were the likeliest."""

    nats: float
    tokens: int
    right: int


class Method(Protocol):
    """What the tasks need."""

    name: str

    def read(self, documents: Sequence[str]) -> Held:
        """Take in documents, without knowing what will be asked."""
        ...

    def reply(self, held: Held, requests: Sequence[str], *, max_new_tokens: int) -> list[str]:
        """One greedy reply per document, to a request each, which stands behind the document."""
        ...

    def rebuild(self, held: Held) -> list[str]:
        """Each document again, greedily. Raises InputError where the method can't."""
        ...

    def forced(self, held: Held, documents: Sequence[str]) -> list[Forced]:
        """Each document rebuilt token by token, the tokens before it given. Raises InputError where the method can't."""
        ...

    def selected(self, held: Held) -> list[list[int]]:
        """Of each document, the ids of the tokens whose states are held, kept first ones left out."""
        ...

    def tokens_of(self, text: str | Sequence[int]) -> list[str]:
        """A text's tokens, or those of some ids, as they read."""
        ...


class Compressed:
    """Dodo's nuggets, chosen by the scorer or, as controls, by a fixed stride or at random, with the same adapters."""

    def __init__(self, dodo: Dodo, *, ratio: float, choice: Choice = "scorer", use: Use = "text", seed: int = 0) -> None:
        self.dodo, self.ratio, self.choice, self.use = dodo, ratio, choice, use
        self.name: str = "dodo" if choice == "scorer" else choice
        self._seed = seed

    @torch.no_grad()
    def read(self, documents: Sequence[str]) -> Held:
        if self.choice == "scorer":
            nuggets = self.dodo.compress(list(documents), ratio=self.ratio, use=self.use)
        else:
            rows = [self.dodo.document_ids(text) for text in documents]
            nuggets = self.encode(*pad_rows(rows, 0, left=False, device=self.dodo.device))
        states = nuggets.states.tolist()
        return Held(states, (nuggets.lengths + nuggets.sinks).tolist(), nuggets, cached(self.dodo, states))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Nuggets:
        """Nuggets of token ids, int64 [B, T], chosen in this method's way."""
        select_by = self._select_by(input_ids, attention_mask.bool())
        return self.dodo.compressor.encode(input_ids, attention_mask, ratio=self.ratio, use=self.use, select_by=select_by)

    def bytes_of(self, states: float) -> float:
        """Of the keys and values of so many states."""
        return cached(self.dodo, [states])[0]

    def _select_by(self, input_ids: Tensor, mask: Tensor) -> Tensor | None:
        if self.choice == "scorer":
            return None
        if self.choice == "random":
            return torch.stack([self._drawn(ids, real) for ids, real in zip(input_ids, mask, strict=True)]).to(mask.device)
        return stride(mask, ratio=self.ratio, keep_first=self.dodo.config.keep_first)

    def _drawn(self, ids: Tensor, real: Tensor) -> Tensor:
        """Random scores, the same for a text in whatever company."""
        drawn = np.random.default_rng((self._seed, zlib.crc32(str(ids[real].tolist()).encode())))
        return torch.from_numpy(drawn.random(len(ids), dtype=np.float32))

    def reply(self, held: Held, requests: Sequence[str], *, max_new_tokens: int) -> list[str]:
        prompts = [request_prompt(self.dodo.tokenizer, request) for request in requests]
        made = self.dodo.generate(held.what, prompts, max_new_tokens=max_new_tokens, **_ends(self.dodo))
        return [made] if isinstance(made, str) else made

    def rebuild(self, held: Held) -> list[str]:
        made = self.dodo.reconstruct(held.what)
        return [made] if isinstance(made, str) else made

    def forced(self, held: Held, documents: Sequence[str]) -> list[Forced]:
        def decode(ids: Tensor, mask: Tensor) -> Tensor:
            return self.dodo.compressor.decode(held.what, ids, mask, soft_token=True, states=True)

        return _forced(self.dodo, documents, decode)

    def selected(self, held: Held) -> list[list[int]]:
        nuggets: Nuggets = held.what
        rows = zip(nuggets.token_ids, nuggets.mask, nuggets.sinks.tolist(), strict=True)
        return [ids[mask][sinks:].tolist() for ids, mask, sinks in rows]

    def tokens_of(self, text: str | Sequence[int]) -> list[str]:
        ids = own_ids(self.dodo, text) if isinstance(text, str) else text
        return [str(self.dodo.tokenizer.decode([i], clean_up_tokenization_spaces=False)) for i in ids]


class Memorized:
    """ICAE: memory slots, as many as Dodo would have nuggets, or all where the adapters were trained so.

    Raises:
        InputError: the adapters have no memory tokens.
    """

    name = "icae"

    def __init__(self, dodo: Dodo, *, ratio: float) -> None:
        self.dodo, self.ratio, self.icae = dodo, ratio, Icae(dodo.compressor)

    @torch.no_grad()
    def read(self, documents: Sequence[str]) -> Held:
        rows = [self.dodo.document_ids(text) for text in documents]
        ids, mask = pad_rows(rows, 0, left=False, device=self.dodo.device)
        memory = self.icae.encode(ids, mask, slots=self.icae.slots(mask, ratio=self.ratio))
        counts = memory.counts.tolist()
        slot = memory.states.shape[2] * memory.states.element_size()
        return Held(counts, [len(row) for row in rows], memory, [slot * count for count in counts])

    def reply(self, held: Held, requests: Sequence[str], *, max_new_tokens: int) -> list[str]:
        tokenizer = self.dodo.tokenizer
        turns = [request_prompt(tokenizer, request) for request in requests]
        prompts = [tokenizer(turn, add_special_tokens=False, verbose=False)["input_ids"] for turn in turns]
        return self._texts(self.icae.generate_ids(held.what, prompts, max_new_tokens=max_new_tokens, **_ends(self.dodo)))

    def rebuild(self, held: Held) -> list[str]:
        made = self.icae.generate_ids(held.what, None, max_new_tokens=max(held.tokens) + 1)
        return self._texts([ids[: tokens + 1] for ids, tokens in zip(made, held.tokens, strict=True)])

    def _texts(self, rows: list[list[int]]) -> list[str]:
        decode = self.dodo.tokenizer.decode
        return [str(decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for ids in rows]

    def forced(self, held: Held, documents: Sequence[str]) -> list[Forced]:
        def decode(ids: Tensor, mask: Tensor) -> Tensor:
            return self.icae.decode(held.what, ids, mask, soft_token=True)

        return _forced(self.dodo, documents, decode)

    def selected(self, held: Held) -> list[list[int]]:
        raise InputError("method 'icae' selects no tokens")

    def tokens_of(self, text: str | Sequence[int]) -> list[str]:
        raise InputError("method 'icae' selects no tokens")


def _ends(dodo: Dodo) -> dict[str, Any]:
    """Where replies end, whatever the method."""
    return {"eos_token_id": dodo.answer_ends} if dodo.answer_ends else {}


def cached(dodo: Dodo, states: Sequence[float]) -> list[float]:
    """Bytes of the keys and values of so many states of each document."""
    base: Any = dodo.compressor.base
    return [count * state_bytes(base.config, bytes_per_number=base.dtype.itemsize) for count in states]


@torch.no_grad()
def _forced(dodo: Dodo, documents: Sequence[str], decode: Callable[[Tensor, Tensor], Tensor]) -> list[Forced]:
    """See `Method.forced`. `decode` takes ids and mask [B, M - 1] and gives states [B, M, d], the soft token's first."""
    ids, mask = pad_rows([own_ids(dodo, text) for text in documents], 0, left=False, device=dodo.device)
    found = []
    for row, target, real in zip(decode(ids[:, :-1], mask[:, :-1]), ids, mask.bool(), strict=True):
        logits, wanted = logits_of(dodo.compressor.base, row[real]).float(), target[real]
        nats = float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        found.append(Forced(nats, int(real.sum()), int((logits.argmax(-1) == wanted).sum())))
    return found


def states_of(dodo: Dodo, document: str, ratio: float) -> int:
    """How many states Dodo holds of a document: ceil(n / r), and one more where it keeps the first token."""
    tokens = len(dodo.document_ids(document))
    first = int(dodo.config.keep_first and tokens > 1)
    return count_nuggets(tokens - first, ratio=ratio) + first


def own_ids(dodo: Dodo, text: str) -> list[int]:
    """Of a text without a BOS token."""
    ids: list[int] = dodo.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return ids


class Whole:
    """The base itself, adapters off, with the document in its prompt as Appendix D has it: all of it, the end of it, or none.

    Args:
        ratio: None keeps the whole document; else its last ceil(n / r) tokens; infinity: nothing.
    """

    def __init__(self, dodo: Dodo, *, name: str, ratio: float | None = None) -> None:
        self.dodo, self.name, self.ratio = dodo, name, ratio

    def read(self, documents: Sequence[str]) -> Held:
        rows = [self.dodo.document_ids(text) for text in documents]
        tokens = [len(row) for row in rows]
        if self.ratio is None:
            return Held(tokens, tokens, list(documents), cached(self.dodo, tokens))
        if self.ratio == float("inf"):
            return Held([0] * len(rows), tokens, [""] * len(rows), [0] * len(rows))
        kept = [row[-count_nuggets(len(row), ratio=self.ratio) :] for row in rows]
        texts = [self.dodo.tokenizer.decode(row, skip_special_tokens=True) for row in kept]
        states = [len(row) for row in kept]
        return Held(states, tokens, texts, cached(self.dodo, states))

    def reply(self, held: Held, requests: Sequence[str], *, max_new_tokens: int, exactly: bool = False) -> list[str]:
        """One greedy reply per document, to its end or `exactly` so long."""
        asked = zip(held.what, requests, strict=True)
        turns = [opening_turn(self.dodo.tokenizer, f"{document}\n{request}".strip()) for document, request in asked]
        return self._write(turns, max_new_tokens, exactly)

    def _write(self, prompts: Sequence[str], max_new_tokens: int, exactly: bool = False) -> list[str]:
        return self._written(self._prompt_ids(prompts), max_new_tokens, exactly)

    def _prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        tokenizer = self.dodo.tokenizer
        return [tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] for prompt in prompts]

    @torch.no_grad()
    def _written(
        self, rows: list[list[int]], max_new_tokens: int, exactly: bool = False, adapter: AdapterName | None = None
    ) -> list[str]:
        dodo, tokenizer = self.dodo, self.dodo.tokenizer
        needed, window = max(map(len, rows)) + max_new_tokens, dodo.compressor.window
        if needed > window:
            raise WindowError(f"{self.name} needs {needed:,} positions for text and answer, but the base's window has {window:,}")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        ids, mask = pad_rows(rows, pad, left=True, device=dodo.device)
        asked = {"min_new_tokens": max_new_tokens} if exactly else {}
        settings, rest = generation_settings(dodo.compressor, max_new_tokens, pad, asked | _ends(dodo))
        adapters = dodo.compressor.adapters
        with adapters.merged(adapter) if adapter else adapters.use(None):
            made = generated(dodo.compressor.base, {"input_ids": ids, "attention_mask": mask}, settings, rest)
        new = [until_end(row, settings.eos_token_id) for row in made[:, ids.shape[1] :].tolist()]
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in new]

    def rebuild(self, held: Held) -> list[str]:
        raise InputError(f"method {self.name!r} can't rebuild a document: it has no trained way to ask for it")

    def forced(self, held: Held, documents: Sequence[str]) -> list[Forced]:
        raise InputError(f"method {self.name!r} can't rebuild a document: it has no trained way to ask for it")

    def selected(self, held: Held) -> list[list[int]]:
        raise InputError(f"method {self.name!r} selects no tokens")

    def tokens_of(self, text: str | Sequence[int]) -> list[str]:
        raise InputError(f"method {self.name!r} selects no tokens")


class Summarized(Whole):
    """LMSumm: the base is asked to shorten the document to the r-th part of its words, and reads the summary in its place.

    Of the summary as many tokens count as Dodo would hold states. Paper: Section 6, Appendix D.1.
    """

    def __init__(self, dodo: Dodo, *, ratio: float) -> None:
        super().__init__(dodo, name="lmsumm")
        self._share = ratio

    def read(self, documents: Sequence[str]) -> Held:
        tokens = [len(self.dodo.document_ids(text)) for text in documents]
        wanted = [math.ceil(len(text.split()) / self._share) for text in documents]
        asked = [SHORTEN.format(words=words, text=text) for words, text in zip(wanted, documents, strict=True)]
        turns = [opening_turn(self.dodo.tokenizer, request) for request in asked]
        rooms = [states_of(self.dodo, text, self._share) for text in documents]
        written = [own_ids(self.dodo, text.strip()) for text in self._write(turns, max(rooms))]
        kept = [ids[:room] for ids, room in zip(written, rooms, strict=True)]
        states = [len(ids) for ids in kept]
        summaries = [self.dodo.tokenizer.decode(ids, skip_special_tokens=True) for ids in kept]
        return Held(states, tokens, summaries, cached(self.dodo, states))


class Tuned(Whole):
    """Full, fine-tuned: theta reads the whole document and, behind it, the prompt as Dodo's decoder has it, for so it was trained
    (a recipe's `model: full`). Paper: Section 6."""

    def __init__(self, dodo: Dodo) -> None:
        super().__init__(dodo, name="theta")

    def reply(self, held: Held, requests: Sequence[str], *, max_new_tokens: int, exactly: bool = False) -> list[str]:
        turns = self._prompt_ids([request_prompt(self.dodo.tokenizer, request) for request in requests])
        documents = [self.dodo.document_ids(text) for text in held.what]
        rows = [[*document, *turn] for document, turn in zip(documents, turns, strict=True)]
        return self._written(rows, max_new_tokens, exactly, THETA)


METHODS: dict[str, Callable[[Dodo, float, Use, int], Method]] = {
    "dodo": lambda dodo, ratio, use, seed: Compressed(dodo, ratio=ratio, use=use),
    "stride": lambda dodo, ratio, use, seed: Compressed(dodo, ratio=ratio, choice="stride", use=use),
    "random": lambda dodo, ratio, use, seed: Compressed(dodo, ratio=ratio, choice="random", use=use, seed=seed),
    "icae": lambda dodo, ratio, use, seed: Memorized(dodo, ratio=ratio),
    "full": lambda dodo, ratio, use, seed: Whole(dodo, name="full"),
    "theta": lambda dodo, ratio, use, seed: Tuned(dodo),
    "nodoc": lambda dodo, ratio, use, seed: Whole(dodo, name="nodoc", ratio=float("inf")),
    "lmsumm": lambda dodo, ratio, use, seed: Summarized(dodo, ratio=ratio),
    "truncate": lambda dodo, ratio, use, seed: Whole(dodo, name="truncate", ratio=ratio),
}
"""By name: from a model, a ratio, what documents are read for, and a seed."""


def make_method(
    name: str, dodo: Dodo, ratio: float, *, use: Use = "text", seed: int = 0, peers_python: Path | None = None
) -> Method:
    """A method by its name.

    Args:
        name: of `METHODS`, or of `names.PEERS`.
        dodo: base and adapters.
        ratio: tokens per state.
        use: what documents are read for; peers do not know it.
        seed: of a random selection.
        peers_python: see `peers.find_python`.

    Raises:
        InputError: there is none of that name, or a peer does not start.
    """
    from dodo.evaluation.peers import make_peer  # they build on this module

    if name in PEERS:
        return make_peer(name, dodo, ratio, python=peers_python)
    if name not in METHODS:
        raise InputError(f"there is no method {name!r}; methods are {', '.join((*METHODS, *PEERS))}")
    return METHODS[name](dodo, ratio, use, seed)
