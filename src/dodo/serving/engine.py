"""The engine: one thread that owns the model and answers many requests at once.

Requests join and leave between tokens. Each turn of the thread does at most one other job (compressing, say), reads a bounded
number of prompt tokens, and decodes one token for all rows over nuggets in one forward pass, and for all rows of the plain base
in another. A request's answer is the same alone and in company.

    engine = Engine(dodo)
    ticket = engine.submit(Request(nuggets, prompt_ids, max_new_tokens=64))
    for piece in ticket:  # or: async for piece in ticket
        print(piece.text, end="")

While an engine runs, nothing else may run its model: go through `Engine.run`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dodo.errors import EngineClosed, InputError, QueueFull, WindowError
from dodo.model import Dodo
from dodo.serving.answer import Answer
from dodo.serving.batch import Batch, Prompt, Row
from dodo.serving.request import Piece, Request, Ticket

__all__ = ["Engine", "Piece", "QueueFull", "Request", "Stats", "Ticket"]

PROMPT_TOKENS = 512
"""Prompt tokens read between two tokens of those who are decoding."""


@dataclass(frozen=True)
class Stats:
    """running: requests being read or decoded. queued: those that wait. states: keys and values held by rows that are decoded,
    in tokens. tokens: generated so far."""

    running: int
    queued: int
    states: int
    tokens: int


class Engine:
    """Answers requests over compressed texts in a thread of its own, from construction until `close`.

    Args:
        dodo: the model; its adapters must not be trained or loaded meanwhile.
        max_batch: requests decoded at once.
        max_queue: requests that may wait.
        max_states: states that running requests may come to hold, each counted with as many as the longest, as the memory is.
            Of SmolLM2-135M in fp32, a state takes 46 kB, and while rows come and go there may be room for twice as many each way.

    Raises:
        InputError: a limit is out of range.
    """

    def __init__(self, dodo: Dodo, *, max_batch: int = 32, max_queue: int = 64, max_states: int = 32_768) -> None:
        limits = {"max_batch": (max_batch, 1), "max_queue": (max_queue, 1), "max_states": (max_states, 2)}
        for name, (value, least) in limits.items():
            if value < least:
                raise InputError(f"{name} must be at least {least}, not {value}")
        self._dodo = dodo
        self._max_batch, self._max_queue, self._max_states = max_batch, max_queue, max_states
        base: Any = dodo.compressor.base
        self._vocabulary = int(base.get_input_embeddings().weight.shape[0])
        ends: int | list[int] | None = base.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

        self._changed = threading.Condition()  # guards the next three
        self._waiting: deque[Ticket] = deque()
        self._jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._closed = False

        self._over_nuggets = Batch(dodo.compressor, with_theta=True)
        self._plain = Batch(dodo.compressor, with_theta=False)
        self._batches = (self._over_nuggets, self._plain)
        self._joining: Row | None = None
        self._tokens = 0
        self._seconds = 1.0  # from a request's beginning to its answer's end, recent ones on average
        self._thread = threading.Thread(target=self._work, name="dodo-engine", daemon=True)
        self._thread.start()

    # -- for any thread

    def submit(self, request: Request) -> Ticket:
        """Put a request in the queue.

        Raises:
            InputError: token ids that the model has not, or more states than the engine may hold.
            WindowError: the positions do not fit the base's window.
            FingerprintMismatch: the nuggets were made by another model.
            QueueFull: too many are waiting.
            EngineClosed: after `close`.
        """
        self._check(request)
        ticket = Ticket(request, when_cancelled=self._give_up)
        with self._changed:
            self._check_open()
            if len(self._waiting) >= self._max_queue:
                running = max(1, self.stats().running)  # of these, one is done in so many seconds
                raise QueueFull(len(self._waiting), retry_after=max(1.0, self._seconds / running))
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def run(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call a function that uses the model, on the model's thread, between tokens; answers wait meanwhile.

        The function must not wait for answers, nor for another call.

        Returns:
            Its result to come. Cancelling it works until it is called.

        Raises:
            EngineClosed: after `close`.
        """
        future: Future[Any] = Future()
        with self._changed:
            self._check_open()
            self._jobs.append((future, function, args))
            self._changed.notify()
        return future

    def stats(self) -> Stats:
        """How things stand."""
        running = sum(len(batch.rows) for batch in self._batches) + (self._joining is not None)
        return Stats(running, len(self._waiting), sum(batch.states for batch in self._batches), self._tokens)

    def close(self) -> None:
        """Stop at the next token. What is unanswered then ends with `EngineClosed`; closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _give_up(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                ticket.end()
            self._changed.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine has been closed")

    def _check(self, request: Request) -> None:
        start = 0
        if request.nuggets is not None:
            self._dodo.fingerprint.check(request.nuggets.fingerprint, what="the compressed text")
            start = int(request.nuggets.next_positions)
        if not all(0 <= token < self._vocabulary for token in request.input_ids or ()):
            raise InputError(f"token ids of the prompt must be 0 .. {self._vocabulary - 1}")
        window, needed = self._dodo.compressor.window, start + request.prompt_length + request.max_new_tokens
        if needed > window:
            raise WindowError(
                f"the text's positions, the prompt and {request.max_new_tokens:,} new tokens need {needed:,} positions, but the "
                f"base's window has {window:,}; ask for fewer new tokens, or use nuggets.compact()"
            )
        if request.states > self._max_states:
            raise InputError(
                f"the request may come to hold {request.states:,} states, and the engine holds at most {self._max_states:,}; "
                "ask for fewer new tokens, or compress the text more"
            )

    # -- the model's thread

    def _work(self) -> None:
        try:
            while self._has_work():
                self._do_a_job()
                self._read_prompts()
                for batch in self._batches:
                    self._decode(batch)
        finally:
            self._abandon()

    def _has_work(self) -> bool:
        """Wait for work. Returns False when closed."""
        with self._changed:
            while not (self._closed or self._jobs or self._waiting or self._joining or any(b.rows for b in self._batches)):
                self._changed.wait()
            return not self._closed

    def _do_a_job(self) -> None:
        with self._changed:
            if not self._jobs:
                return
            future, function, args = self._jobs.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*args))
        except BaseException as error:  # handed to who waits for it
            future.set_exception(error)

    def _read_prompts(self) -> None:
        budget = PROMPT_TOKENS
        while budget > 0 and (row := self._joining or self._next()) is not None:
            self._joining = row
            try:
                if row.ticket.cancelled:
                    row.ticket.end()
                else:
                    prompt = row.prompt = row.prompt or Prompt(self._dodo.compressor, row.ticket.request)
                    read, logits = prompt.read(budget)
                    budget -= read
                    if logits is None:
                        continue
                    row.prompt, row.position = None, prompt.position
                    if not self._take(row, logits):
                        (self._plain if row.ticket.request.nuggets is None else self._over_nuggets).join(row, prompt.cache)
            except Exception as error:  # this request's alone
                row.ticket.end(error)
            self._joining = None

    def _next(self) -> Row | None:
        """The next request out of the queue, if there is room for it."""
        rows = [row for batch in self._batches for row in batch.rows]
        with self._changed:
            if not self._waiting or len(rows) == self._max_batch:
                return None
            request = self._waiting[0].request
            if (len(rows) + 1) * max([request.states, *(row.states for row in rows)]) > self._max_states:
                return None
            row = Row(self._waiting[0], Answer(request, self._dodo.tokenizer, self._ends), states=request.states)
            self._waiting.popleft()
        return row

    def _decode(self, batch: Batch) -> None:
        for i in reversed(range(len(batch.rows))):
            if batch.rows[i].ticket.cancelled:
                batch.rows[i].ticket.end()
                batch.leave(i)
        if not batch.rows:
            return
        try:
            logits = batch.step()
        except Exception as error:  # memory, most likely; the other batch goes on
            for row in batch.rows:
                row.ticket.end(error)
            batch.clear()
            return
        for i in reversed(range(len(batch.rows))):  # a row that leaves is replaced by one from behind it
            if self._take(batch.rows[i], logits[i]):
                batch.leave(i)

    def _take(self, row: Row, logits: Tensor) -> bool:
        """Choose a row's next token and hand it to the reader. Returns whether the answer ends."""
        try:
            row.token, piece = row.answer.take(logits)
        except Exception as error:  # logits that are no numbers
            row.ticket.end(error)
            return True
        self._tokens += piece.token_id is not None
        row.ticket.put(piece)
        if piece.finish is not None:
            self._seconds += 0.1 * (time.monotonic() - row.begun - self._seconds)
        return piece.finish is not None

    def _abandon(self) -> None:
        error = EngineClosed("the engine was closed before the answer was complete")
        with self._changed:
            self._closed = True
            rows = [row for batch in self._batches for row in batch.rows] + ([self._joining] if self._joining else [])
            for ticket in [*(row.ticket for row in rows), *self._waiting]:
                ticket.end(error)
            for future, _, _ in self._jobs:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self._waiting.clear()
            self._jobs.clear()
        self._joining = None
        for batch in self._batches:
            batch.clear()
