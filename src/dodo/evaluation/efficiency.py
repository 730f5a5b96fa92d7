"""What compressing costs and saves, by the length of the document, beside the base reading all of it in the same run.

Paper: Section 4.2 argues it, without numbers. Seconds are medians of rounds in which both take turns. `whole` is the base without
adapters: it reads the document again for each question, or keeps the document's whole cache and copies it. Peers compress in a
process of their own, with the same number of threads, and have our base beside them.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from dodo import prompts
from dodo.attention import cache_argument
from dodo.autoregressive import held_bytes
from dodo.config import Use
from dodo.data.reading import read_texts
from dodo.errors import InputError
from dodo.evaluation.methods import Compressed, Held
from dodo.evaluation.peak import forget_peak, peak
from dodo.evaluation.peers import Peer
from dodo.evaluation.tasks import Item, Task, hash_of
from dodo.generation import generated, generation_settings
from dodo.model import Dodo

__all__ = ["LENGTHS", "Efficiency", "break_even", "break_even_length"]

LENGTHS = (512, 1024, 2048, 4096, 8000)
"""The last leaves room in a window of 8,192 for question and answer."""
NEW_TOKENS, ROUNDS, LONG = 33, 3, 60.0
"""Rounds that count, behind one that warms up. If that one takes longer than LONG seconds it counts itself and is the only one:
all that it does was done once before, for the memory."""
QUESTION = "What is this text about?"


@dataclass(frozen=True)
class _Of(Item):
    """A document of so many tokens."""

    length: int = 0


class Efficiency(Task):
    """See above.

    Args:
        lengths: of the documents, in tokens.
    """

    name = "efficiency"
    use: Use = "questions"

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = tuple(lengths)

    def items(self, sources: Sequence[str], tokenizer: Any, limit: int | None, seed: int) -> list[Item]:
        text = "\n\n".join(read_texts(sources))
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        if len(ids) < max(self.lengths):
            raise InputError(f"the texts have {len(ids):,} tokens together; {max(self.lengths):,} are wanted")
        self._ids: list[int] = ids
        return [
            _Of(str(length), "", f"{length:,} tokens", source=hash_of(ids[:length]), length=length) for length in self.lengths
        ]

    def run(self, method: Any, batch: Sequence[Any]) -> list[dict[str, Any]]:
        if isinstance(method, Peer):
            return [self._one(_ByPeer(method, self._ids[: item.length]), item.length) for item in batch]
        if not isinstance(method, Compressed) or method.name != "dodo":
            raise InputError(f"method {method.name!r} is not measured by itself: what compresses has the whole text beside it")
        return [self._one(_ByDodo(method, self._ids[: item.length]), item.length) for item in batch]

    @torch.no_grad()
    def _one(self, way: "_ByDodo | _ByPeer", length: int) -> dict[str, Any]:
        dodo = way.dodo
        base: Any = dodo.compressor.base
        asked = _asked(dodo)
        if length + len(asked) + NEW_TOKENS > dodo.compressor.window:
            raise InputError(
                f"{length:,} tokens with question and answer do not fit the base's window of {dodo.compressor.window:,}; "
                "leave that --length out"
            )
        ids = torch.tensor([self._ids[:length]], device=dodo.device)
        question = torch.tensor([asked], device=dodo.device)
        whole = torch.cat([ids, question], dim=1)

        def read() -> Any:
            with dodo.compressor.adapters.use(None):
                return base(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(base): DynamicCache()})

        def write(new: int, cache: Any = None) -> None:
            inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
            inputs |= {} if cache is None else {cache_argument(base): copy.deepcopy(cache)}
            settings, rest = generation_settings(dodo.compressor, new, 0, {"min_new_tokens": new})
            with dodo.compressor.adapters.use(None):
                generated(base, inputs, settings, rest)

        way.forget_peak()
        way.encode()
        way.ask(NEW_TOKENS)
        mine_at_most = way.peak()
        forget_peak(dodo.device)
        write(NEW_TOKENS)
        whole_at_most = peak(dodo.device)
        kept = read()[cache_argument(base)]
        seconds, rounds = _in_turn(
            {
                "encode": way.encode,
                "whole: read": read,
                "first token": lambda: way.ask(1),
                "whole: first token": lambda: write(1),
                "whole: first token, cache kept": lambda: write(1, kept),
                "all": lambda: way.ask(NEW_TOKENS),
                "whole: all, cache kept": lambda: write(NEW_TOKENS, kept),
            },
            dodo.device,
        )
        later = NEW_TOKENS - 1
        per_token = (seconds.pop("all") - seconds["first token"]) / later
        whole_per_token = (seconds.pop("whole: all, cache kept") - seconds["whole: first token, cache kept"]) / later
        answer = 64
        mine, theirs = seconds["first token"] + answer * per_token, answer * whole_per_token
        return {
            **{f"{name}, s": value for name, value in seconds.items()},
            "each further token, s": per_token,
            "whole: each further token, s": whole_per_token,
            "bytes held": way.held.nbytes[0],
            "whole: bytes held": held_bytes(kept),
            "peak memory, bytes": mine_at_most,
            "whole: peak memory, bytes": whole_at_most,
            "questions from which it is sooner": break_even(seconds["encode"], mine, 0.0, seconds["whole: first token"] + theirs),
            "the same, cache kept": break_even(
                seconds["encode"], mine, seconds["whole: read"], seconds["whole: first token, cache kept"] + theirs
            ),
            "states": way.held.states[0],
            "tokens": length,
            "rounds": rounds,
        }

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        found = {}
        for item in items:
            row = made[item.key]
            found[item.group] = {"n": 1, "states each": row["states"], "ratio": row["tokens"] / row["states"], **row}
        sooner = {values["tokens"]: values["questions from which it is sooner"] == 1 for values in found.values()}
        return {**found, "one question": {"n": len(items), "sooner from tokens": break_even_length(sooner)}}


class _ByDodo:
    """Nuggets of token ids, and questions to them."""

    held: Held

    def __init__(self, method: Compressed, ids: list[int]) -> None:
        self.dodo, self._ratio, self._ids = method.dodo, method.ratio, ids
        self._asked = _asked(method.dodo)

    def encode(self) -> None:
        nuggets = self.dodo.compress_ids([self._ids], ratio=self._ratio)
        self.held = Held(nuggets.states.tolist(), [len(self._ids)], nuggets, [nuggets.nbytes])

    def ask(self, new: int) -> None:
        self.dodo.generate_ids(self.held.what, [self._asked], max_new_tokens=new, min_new_tokens=new)

    def forget_peak(self) -> None:
        forget_peak(self.dodo.device)

    def peak(self) -> int | None:
        return peak(self.dodo.device)


class _ByPeer:
    """The same of a peer, whose process is asked."""

    held: Held

    def __init__(self, method: Peer, ids: list[int]) -> None:
        self.dodo, self._method = method.dodo, method
        self._text = str(method.dodo.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def encode(self) -> None:
        self.held = self._method.read([self._text])

    def ask(self, new: int) -> None:
        request = prompts.QUESTION.format(question=QUESTION)
        self._method.reply(self.held, [request], max_new_tokens=new, exactly=True)

    def forget_peak(self) -> None:
        self._method.forget_peak()

    def peak(self) -> int | None:
        return self._method.peak()


def _asked(dodo: Dodo) -> list[int]:
    ids: list[int] = dodo.tokenizer(prompts.question_prompt(dodo.tokenizer, QUESTION), add_special_tokens=False)["input_ids"]
    return ids


def break_even(once: float, each: float, other_once: float, other_each: float) -> int | None:
    """The least number of questions from which on one way is cheaper than another; None if there is none.

    >>> break_even(10.0, 1.0, 0.0, 3.0), break_even(1.0, 1.0, 2.0, 1.0), break_even(1.0, 2.0, 0.0, 2.0)
    (6, 1, None)
    >>> break_even(1.0, 3.0, 5.0, 2.0)  # cheaper for one question only
    """
    if each >= other_each:
        return 1 if each == other_each and once < other_once else None
    return max(1, math.floor((once - other_once) / (other_each - each)) + 1)


def break_even_length(sooner: dict[int, bool]) -> int | None:
    """The least of the lengths that were measured from which on one way is sooner than another; None if it is not at the longest.

    >>> break_even_length({512: False, 1024: True, 2048: True}), break_even_length({512: True, 1024: False})
    (1024, None)
    """
    lengths = sorted(sooner)
    later = [length for length in lengths if not sooner[length]]
    return next((length for length in lengths if not later or length > later[-1]), None)


def _in_turn(tasks: dict[str, Callable[[], Any]], device: torch.device) -> tuple[dict[str, float], int]:
    """The median seconds of each task, and of how many rounds."""
    rounds: list[dict[str, float]] = []
    while len(rounds) <= ROUNDS and not (rounds and sum(rounds[0].values()) > LONG):
        rounds.append({name: _seconds(task, device) for name, task in tasks.items()})
    counted = rounds[1:] or rounds
    return {name: statistics.median(seconds[name] for seconds in counted) for name in tasks}, len(counted)


def _seconds(task: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
