"""The answers to one HTTP request: several tickets read as one stream, until a deadline, and none left behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dodo.serving.engine import Engine
from dodo.serving.request import Piece, Request, Ticket

__all__ = ["UNBUFFERED", "Answers", "HungUp", "Streamed", "unless_hung_up"]

T = TypeVar("T")


class HungUp(Exception):
    """The client has closed the connection; nobody reads what would be answered."""


class Answers:
    """Tickets of one HTTP request, submitted together: all of them or none.

    Iterate once, over pairs of a ticket's number and its next piece, as they come. Whoever makes one must `cancel` it in the end.

    Args:
        engine: what answers.
        requests: one for each choice.
        seconds: until when all must be answered.

    Raises:
        InputError, WindowError, FingerprintMismatch, QueueFull, EngineClosed: see `Engine.submit_all`.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], *, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._tickets: list[Ticket] = engine.submit_all(requests)

    def cancel(self) -> None:
        """Free what is still being answered; what is done stays done."""
        for ticket in self._tickets:
            ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """Raises TimeoutError at the deadline, and what went wrong with any of the tickets."""
        coming: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
        readers = [asyncio.create_task(_read(i, ticket, coming)) for i, ticket in enumerate(self._tickets)]
        left, clock = len(readers), asyncio.get_running_loop().time
        try:
            while left:
                item = await asyncio.wait_for(coming.get(), self._deadline - clock())
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()


UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of events, which proxies must hand on as they come."""


class Streamed(StreamingResponse):
    """Server-sent events of answers that are given up when the response ends, however it does."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], answers: Answers) -> None:
        super().__init__(events, headers=UNBUFFERED)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def unless_hung_up(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Do some work, and cancel it at once if the client closes the connection.

    Raises:
        HungUp: it did.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _hang_up(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(number: int, ticket: Ticket, coming: "asyncio.Queue[tuple[int, Piece] | Exception | None]") -> None:
    try:
        async for piece in ticket:
            coming.put_nowait((number, piece))
        coming.put_nowait(None)
    except Exception as error:  # raised where it is read
        coming.put_nowait(error)
