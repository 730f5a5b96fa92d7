"""Perplexity by position of texts many windows long, read on in bounded memory. Paper: Section 2.2; docs/decisions/0009.

A text is read from its first token to its last, each token predicted from what the method holds there: `dodo` at most S states,
a share of them for the latest tokens and the segment, the others nuggets; `window` the latest alone, and the first token if the
configuration keeps it; `full` the base with all of it, whose memory has no bound and whose positions leave its window. Perplexity
is given for each stretch of `STRETCH` tokens, so that one sees whether it holds.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dodo.attention import cache_argument
from dodo.autoregressive import held_bytes
from dodo.data.reading import read_texts
from dodo.errors import InputError
from dodo.evaluation.language_models import whole_of
from dodo.evaluation.scoring import perplexity
from dodo.evaluation.tasks import Item, hash_of
from dodo.model import Dodo
from dodo.streaming import StreamingCache, feed

__all__ = ["READERS", "STRETCH", "Endless", "Reader", "make_reader"]

STRETCH, PIECE, SEGMENT = 2048, 128, 64

Reader = Callable[[Tensor], Iterator[tuple[Tensor, int, int]]]
"""Takes the tokens of a text, int64 [n]; gives for each piece of it the logits, [t, V], and the states and bytes then held."""


class Endless:
    """See above.

    Args:
        dodo: whose tokenizer reads the texts.
    """

    name = "endless"

    def __init__(self, dodo: Dodo) -> None:
        self._dodo = dodo

    def items(self, sources: Sequence[str], limit: int | None, seed: int) -> list[Item]:
        """The texts that are longer than a stretch, in their order, each up to its first `limit` tokens."""
        texts = list(read_texts(sources))
        self._ids = [self._dodo.document_ids(text)[:limit] for text in texts if text]
        found = [Item(str(i), "", "all", source=hash_of(ids)) for i, ids in enumerate(self._ids) if len(ids) > STRETCH]
        if not found:
            of = f"no text has more than {STRETCH:,} tokens, one stretch"
            raise InputError(of if limit is None or limit > STRETCH else f"--limit must be above {STRETCH:,} tokens, one stretch")
        return found

    @torch.no_grad()
    def run(self, method: Reader, batch: Sequence[Item]) -> list[dict[str, Any]]:
        """Nats of all tokens after the first of each text, summed over pieces of the text, and the most that was held."""
        return [self._read(method, torch.tensor(self._ids[int(item.key)], device=self._dodo.device)) for item in batch]

    def _read(self, method: Reader, ids: Tensor) -> dict[str, Any]:
        pieces: list[tuple[float, int]] = []
        at, most_states, most_bytes = 0, 0, 0
        for logits, states, held in method(ids):
            targets = ids[at + 1 : at + 1 + len(logits)]
            nats = torch.nn.functional.cross_entropy(logits[: len(targets)].float(), targets, reduction="sum")
            pieces.append((round(float(nats), 4), len(targets)))
            at += len(logits)
            most_states, most_bytes = max(most_states, states), max(most_bytes, held)
        return {"pieces": pieces, "states": most_states, "bytes": most_bytes}

    def each(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """For each stretch: nats per token of the pieces in it."""
        return {
            name: [round(nats / count, 5) for nats, count in pieces if count] for name, pieces in _stretches(items, made).items()
        }

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Perplexity of each stretch, its standard error from the pieces in it, and what was held at most."""
        found: dict[str, Any] = {}
        for name, pieces in _stretches(items, made).items():
            value, error = perplexity([n for n, _ in pieces], [count for _, count in pieces])
            found[name] = {
                "n": sum(count for _, count in pieces),
                "perplexity": value,
                "perplexity standard error": error,
            }
        most = {f"{name} held at most": max(made[item.key][name] for item in items) for name in ("states", "bytes")}
        return found | {"all": {"texts": len(items), **most}}


def _stretches(items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, int]]]:
    """Nats and tokens of the pieces, by the stretch of their text that they begin in."""
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for item in items:
        at = 0
        for nats, count in made[item.key]["pieces"]:
            found[at // STRETCH].append((nats, count))
            at += count
    return {f"tokens from {i * STRETCH:,}": pieces for i, pieces in sorted(found.items())}


def _streamed(dodo: Dodo, *, window: int, **choice: Any) -> Reader:
    lm = dodo.autoregressive(window=window, segment=SEGMENT, **choice)

    def read(ids: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        cache = StreamingCache(lm)
        for piece in ids.split(PIECE):
            logits = feed(cache, piece[None])[0]
            yield logits, cache.states.get_seq_length(), cache.nbytes

    return read


def _whole(dodo: Dodo) -> Reader:
    base: Any = dodo.compressor.base

    def read(ids: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        cache = DynamicCache()
        for piece in ids.split(PIECE):
            with dodo.compressor.adapters.use(None):
                logits = base(input_ids=piece[None], use_cache=True, **{cache_argument(base): cache}).logits[0]
            yield logits, cache.get_seq_length(), held_bytes(cache)

    return read


READERS: dict[str, Callable[[Dodo, float, int, float], Reader]] = {
    "dodo": lambda dodo, ratio, states, share: _streamed(
        dodo, window=whole_of(states, share) - SEGMENT, max_states=states, ratio=ratio
    ),
    "window": lambda dodo, ratio, states, share: _streamed(
        dodo, window=states - SEGMENT - int(dodo.config.keep_first), threshold=math.inf
    ),
    "full": lambda dodo, ratio, states, share: _whole(dodo),
}
"""By name: from a model, a ratio, the states held at most, and the share of them that is whole tokens."""


def make_reader(name: str, dodo: Dodo, ratio: float, states: int, share: float = 0.5) -> Reader:
    """A reader by its name.

    Raises:
        InputError: there is none of that name, no thresholds for the ratio, or too few or too many states.
    """
    if name not in READERS:
        raise InputError(f"method {name!r} can't do task endless; methods are {', '.join(READERS)}")
    if name != "full" and (whole_of(states, share) <= SEGMENT or states <= SEGMENT + 2):
        raise InputError(f"{states} states are too few: {share:g} of them hold a segment of {SEGMENT} tokens and those before it")
    return READERS[name](dodo, ratio, states, share)
