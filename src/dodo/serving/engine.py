"""The engine: one thread that owns the model and answers many requests at once.

Requests join and leave between tokens. Each turn of the thread does at most one other job (compressing, say), reads a bounded
number of prompt tokens in one forward pass, and decodes one token for all rows over nuggets in another, and for all rows of the
plain base in a third. A long job takes turns with the answers, between the parts of the model's layers. A request's answer is
the same alone and in company.

    engine = Engine(dodo)
    ticket = engine.submit(Request(nuggets, prompt_ids, max_new_tokens=64))
    for piece in ticket:  # or: async for piece in ticket
        print(piece.text, end="")

While an engine runs, nothing else may run its model: go through `Engine.run`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dodo.errors import EngineClosed, InputError, QueueFull, WindowError
from dodo.model import Dodo
from dodo.serving.answer import Answer
from dodo.serving.batch import Batch, Row
from dodo.serving.progress import pausing
from dodo.serving.request import Piece, Request, Ticket

__all__ = ["Engine", "Piece", "QueueFull", "Request", "Stats", "Ticket"]

PROMPT_TOKENS = 512
"""Prompt tokens read between two tokens of those who are decoding, padding among them."""


@dataclass(frozen=True)
class Stats:
    """running: requests being read or decoded. queued: those that wait. states: keys and values held by rows that are decoded,
    in tokens. tokens: generated so far."""

    running: int
    queued: int
    states: int
    tokens: int


class _Job(Future[Any]):
    """A function to be called, and its result. `cancel` also tells a function that is running to end."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.function, self.args, self.wanted = function, args, True

    def cancel(self) -> bool:
        self.wanted = False
        return super().cancel()


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
        with dodo.compressor.adapters.lock:  # a generation that runs has the base's config changed
            ends: int | list[int] | None = base.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

        self._changed = threading.Condition()  # guards the next three
        self._waiting: deque[Ticket] = deque()
        self._jobs: deque[_Job] = deque()
        self._closed = False

        self._over_nuggets = Batch(dodo.compressor, with_theta=True)
        self._plain = Batch(dodo.compressor, with_theta=False)
        self._batches = (self._over_nuggets, self._plain)
        self._reading: Batch | None = None  # prompts; several are read in one pass, a longer one in pieces by itself
        self._apart: list[Ticket] = []  # of a pass that failed: each is read again, by itself
        self._answers_until = 0.0  # seconds: a job that runs goes on until then, before answers have a turn
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
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Ticket]:
        """Put requests that belong together in the queue: all of them or none. Where nobody waits they may be more than the queue
        has places: later there is no more room for them.

        Raises:
            As `submit`.
        """
        for request in requests:
            self._check(request)
        tickets = [Ticket(request, when_cancelled=self._give_up) for request in requests]
        with self._changed:
            self.check_open()
            if self._waiting and len(self._waiting) + len(requests) > self._max_queue:
                running = max(1, self.stats().running)  # of these, one is done in so many seconds
                raise QueueFull(len(self._waiting), retry_after=max(1.0, self._seconds / running))
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def run(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call a function that uses the model, on the model's thread, between tokens.

        While it runs the model, answers go on between the parts of the layers, for half of the time at most; while it does
        something else they wait. It must not wait for answers, nor for another call.

        Returns:
            Its result to come. When it is cancelled, or the engine closed, the function is not called, or is ended by an
            exception between two parts of a layer.

        Raises:
            EngineClosed: after `close`.
        """
        job = _Job(function, args)
        with self._changed:
            self.check_open()
            self._jobs.append(job)
            self._changed.notify()
        return job

    def stats(self) -> Stats:
        """How things stand."""
        states = sum(batch.states for batch in self._batches)
        return Stats(len(self._running()), len(self._waiting), states, self._tokens)

    def check_open(self) -> None:
        """Raise EngineClosed after `close`, or when the model's thread has died."""
        if self._closed:
            raise EngineClosed("the engine has been closed")

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

    def _check(self, request: Request) -> None:
        start = 0
        if request.nuggets is not None:
            self._dodo.fingerprint.check(request.nuggets.fingerprint, what="the compressed text")
            start = int(request.nuggets.next_positions)
        if not all(0 <= token < self._vocabulary for token in request.input_ids or ()):
            raise InputError(f"token ids of the prompt must be 0 .. {self._vocabulary - 1}")
        window, needed = self._dodo.compressor.window, start + request.prompt_length + request.max_new_tokens
        if needed > window:
            parts, help_with = (
                ("the prompt", "shorten the prompt")
                if request.nuggets is None
                else ("the text's positions, the prompt", "compress the text more")
            )
            raise WindowError(
                f"{parts} and {request.max_new_tokens:,} new tokens need {needed:,} positions, but the base's window has "
                f"{window:,}; ask for fewer new tokens, or {help_with}"
            )
        if request.states > self._max_states:
            raise InputError(
                f"the request may come to hold {request.states:,} states, and the engine holds at most {self._max_states:,}; "
                "ask for fewer new tokens, or compress the text more"
            )

    def _running(self) -> list[Ticket]:
        reading = self._reading  # may be another the next moment
        rows = [*self._over_nuggets.rows, *self._plain.rows, *(() if reading is None else reading.rows)]
        return [*(row.ticket for row in rows), *self._apart]

    # -- the model's thread

    def _work(self) -> None:
        try:
            while self._has_work():
                self._do_a_job()
                self._answer()
        finally:
            self._abandon()

    def _has_work(self) -> bool:
        """Wait for work. Returns False when closed."""
        with self._changed:
            while not (self._closed or self._jobs or self._waiting or self._running()):
                self._changed.wait()
            return not self._closed

    def _do_a_job(self) -> None:
        with self._changed:
            if not self._jobs:
                return
            job = self._jobs.popleft()
        if not job.set_running_or_notify_cancel():
            return
        try:
            with pausing(self._dodo.compressor, lambda: self._breathe(job)):
                result = job.function(*job.args)
        except BaseException as error:  # handed to who waits for it
            job.set_exception(error)
        else:
            job.set_result(result)

    def _breathe(self, job: "_Job") -> None:
        """In the middle of a job, answer for as long as the job has gone on since it last came to this."""
        self.check_open()
        if not job.wanted:
            raise CancelledError
        if (now := time.monotonic()) < self._answers_until:
            return
        self._answer()
        end = time.monotonic()
        self._answers_until = end + (end - now)

    def _answer(self) -> None:
        """One token more for everybody."""
        self._read_prompts()
        for batch in self._batches:
            self._decode(batch)

    def _read_prompts(self) -> None:
        """One pass over the prompts that are being read, or those that come next."""
        reading = self._reading = self._reading or self._gather()
        if reading is None:
            return
        try:
            _let_go(reading)
            if reading.rows:
                self._read(reading)
        except Exception as error:
            tickets = [row.ticket for row in reading.rows]
            if len(tickets) == 1:
                tickets[0].end(error)
            else:  # whose fault it was is seen when each is read by itself
                self._apart.extend(tickets)
            reading.clear()
        if not reading.rows:
            self._reading = None

    def _read(self, reading: Batch) -> None:
        logits = reading.step(PROMPT_TOKENS)
        if any(row.unread for row in reading.rows):
            return
        batch = self._over_nuggets if reading.with_theta else self._plain
        for i, (row, ends) in enumerate(zip(reading.rows, self._take(reading.rows, logits), strict=True)):
            if not ends:
                try:
                    batch.join(reading, i)
                except Exception as error:  # memory, most likely
                    row.ticket.end(error)
        reading.clear()

    def _gather(self) -> Batch | None:
        """The next requests that there is room for and that one pass can read; or one, if it takes several. None: no more."""
        group: list[Ticket] = []
        if self._apart:
            group.append(self._apart.pop(0))
        else:
            while (ticket := self._next(group)) is not None:
                group.append(ticket)
        if not group:
            return None
        requests = [ticket.request for ticket in group]
        batch = Batch(self._dodo.compressor, with_theta=requests[0].nuggets is not None)
        for ticket in group:
            try:
                batch.cache.reserve(len(group), max(request.states - request.max_new_tokens for request in requests))
                batch.begin(Row(ticket, Answer(ticket.request, self._dodo.tokenizer, self._ends)))
            except Exception as error:  # this request's alone
                ticket.end(error)
        return batch

    def _next(self, group: list[Ticket]) -> Ticket | None:
        """The next request out of the queue, if there is room for it, and if it can be read in one pass with a group."""
        running = [ticket.request for ticket in (*self._running(), *group)]
        with self._changed:
            if not self._waiting or len(running) >= self._max_batch:
                return None
            request = self._waiting[0].request
            if (len(running) + 1) * max(each.states for each in (request, *running)) > self._max_states:
                return None
            together = [request, *(ticket.request for ticket in group)]
            if len({each.nuggets is None for each in together}) > 1:
                return None
            if group and len(together) * max(each.prompt_length for each in together) > PROMPT_TOKENS:
                return None
            return self._waiting.popleft()

    def _decode(self, batch: Batch) -> None:
        try:
            _let_go(batch)
            if not batch.rows:
                return
            ends = self._take(batch.rows, batch.step())
            for i in reversed(range(len(ends))):  # a row that leaves is replaced by one from behind it
                if ends[i]:
                    batch.leave(i)
        except Exception as error:  # memory, most likely; the other batch goes on
            for row in batch.rows:
                row.ticket.end(error)
            batch.clear()

    def _take(self, rows: Sequence[Row], logits: Tensor) -> list[bool]:
        """Choose the next token of each row, from fp32 [R, V], and hand it to its reader. Returns whether each answer ends."""
        highest, likeliest = (best.tolist() for best in logits.max(-1))
        return [self._hand(row, logits[i], highest=highest[i], likeliest=likeliest[i]) for i, row in enumerate(rows)]

    def _hand(self, row: Row, logits: Tensor, *, highest: float, likeliest: int) -> bool:
        try:
            token, piece = row.answer.take(logits, highest=highest, likeliest=likeliest)
        except Exception as error:  # logits that are no numbers: this row's alone
            row.ticket.end(error)
            return True
        row.unread.append(token)
        self._tokens += piece.token_id is not None
        row.ticket.put(piece)
        if piece.finish is not None:
            self._seconds += 0.1 * (time.monotonic() - row.begun - self._seconds)
        return piece.finish is not None

    def _abandon(self) -> None:
        error = EngineClosed("the engine was closed before the answer was complete")
        with self._changed:
            self._closed = True
            for ticket in [*self._running(), *self._waiting]:
                ticket.end(error)
            for job in self._jobs:
                if job.set_running_or_notify_cancel():
                    job.set_exception(error)
            self._waiting.clear()
            self._jobs.clear()
        self._reading = None
        self._apart.clear()
        for batch in self._batches:
            batch.clear()


def _let_go(batch: Batch) -> None:
    """Rows whose readers have given up leave."""
    for i in reversed(range(len(batch.rows))):
        if (row := batch.rows[i]).ticket.cancelled:
            batch.leave(i)
            row.ticket.end()
