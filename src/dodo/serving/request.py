"""What is asked of the engine, and what comes back: requests, pieces, and the tickets that bring them across threads."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dodo.errors import InputError
from dodo.nuggets import Nuggets

__all__ = ["Piece", "Request", "Ticket"]


@dataclass(frozen=True)
class Request:
    """A question over one compressed text, or to the base as it is.

    nuggets: of one text; None asks the base with adapters off.
    input_ids: the prompt behind the nuggets, or the whole prompt; None asks for the text itself, by the soft token (Section 4).
    max_new_tokens: at most so many tokens.
    temperature: 0 is greedy.
    top_p: sample from the most likely tokens that have this much of the probability.
    seed: the same seed gives the same answer, whatever else runs; None: another one each time.
    stop: texts that end the answer; none of them is in it.
    top_logprobs: so many of the most likely tokens with each token; None: no log probabilities at all.
    ends: more tokens that end the answer, beside the base's.
    goes_on: the answer goes on with the prompt's text, whose last word and the answer's first may have a space between them.

    Raises:
        InputError: a value is out of range.
    """

    nuggets: Nuggets | None
    input_ids: Sequence[int] | None
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    top_logprobs: int | None = None
    ends: frozenset[int] = frozenset()
    goes_on: bool = False

    def __post_init__(self) -> None:
        if self.nuggets is not None and self.nuggets.batch_size != 1:
            raise InputError(f"a request is over one text, not {self.nuggets.batch_size}; take one out of its batch: nuggets[i]")
        if self.input_ids is None and self.nuggets is None:
            raise InputError("there is nothing to rebuild a text from; give its nuggets, or a prompt")
        if self.input_ids is not None and not len(self.input_ids):
            raise InputError("the prompt is empty")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature must be 0 (greedy) or more, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p:g}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed must fit 64 bits, not be {self.seed}")
        if isinstance(self.stop, str) or "" in self.stop:
            raise InputError("stop must be a list of texts, none of them empty")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise InputError(f"top_logprobs must be 0 or more, not {self.top_logprobs}")

    @property
    def prompt_length(self) -> int:
        """States that the prompt takes."""
        return 1 if self.input_ids is None else len(self.input_ids)

    @property
    def states(self) -> int:
        """How many states it may come to hold."""
        held = 0 if self.nuggets is None else int(self.nuggets.states)
        return held + self.prompt_length + self.max_new_tokens


@dataclass(frozen=True)
class Piece:
    """What one token brings.

    token_id: None where the answer ends with an end token, which is no part of it.
    text: what is certain by now: complete characters, and nothing that may turn out to begin a stop text; often empty.
    logprob: natural logarithm of the token's probability, before temperature and top_p; None where none were asked for.
    top: the most likely tokens and theirs, best first.
    offset: characters of the answer before the token, also of those that are held back.
    finish: why the answer ends with this piece, or None.
    """

    token_id: int | None
    text: str
    logprob: float | None = None
    top: Sequence[tuple[int, float]] | None = None
    finish: Literal["stop", "length"] | None = None
    offset: int = 0


class Ticket:
    """The pieces of one answer as they come, for one reader: iterate over it, plainly or with `async for` in any event loop.

    Iteration ends behind the piece with a `finish`, or when the ticket is cancelled; it raises what went wrong.
    Who does not want the rest must cancel: an answer is made to its end whether it is read or not.
    The model's thread calls `put` and `end`.
    """

    def __init__(self, request: Request, *, when_cancelled: Callable[["Ticket"], None]) -> None:
        self.request = request
        self.cancelled = False
        self._when_cancelled = when_cancelled
        self._coming: deque[Future[Piece | None]] = deque([_pending()])
        self._over = False

    def cancel(self) -> None:
        """Give up: the request leaves the queue at once, or its row is freed before the next token. May come from any thread."""
        self.cancelled = True
        self._when_cancelled(self)

    def put(self, piece: Piece) -> None:
        """Hand the reader a piece."""
        self._coming.append(_pending())  # first, so that a reader always finds the next one
        self._coming[-2].set_result(piece)

    def end(self, error: Exception | None = None) -> None:
        """End an answer that has no last piece. What has ended already stays as it is."""
        if self._coming[-1].done():
            return
        if error is None:
            self._coming[-1].set_result(None)
        else:
            self._coming[-1].set_exception(error)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if not self._over:
            self._coming[0].exception()  # waits
            if (piece := self._next()) is not None:
                return piece
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if not self._over:
            with suppress(Exception):  # which is raised below
                await asyncio.wrap_future(self._coming[0])
            if (piece := self._next()) is not None:
                return piece
        raise StopAsyncIteration

    def _next(self) -> Piece | None:
        coming = self._coming[0]
        piece = None if coming.exception() else coming.result()
        self._over = piece is None or piece.finish is not None
        if not self._over:
            self._coming.popleft()
        return coming.result()


def _pending() -> "Future[Piece | None]":
    future: Future[Piece | None] = Future()
    future.set_running_or_notify_cancel()  # a reader that is cancelled must not cancel it
    return future
