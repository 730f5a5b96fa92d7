"""uvicorn's server, which ends what it can't wait for with an error of ours before it cuts the connections."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn

__all__ = ["Server"]


class Server(uvicorn.Server):
    """Serves until it is interrupted; then it takes nothing more and waits for what is being answered.

    Args:
        config: uvicorn's; how long it waits at the end is set here.
        close: ends all that is still being answered, as `Engine.close` does; may take a moment.
        grace: seconds before that.
    """

    def __init__(self, config: uvicorn.Config, *, close: Callable[[], None], grace: float = 5.0) -> None:
        config.timeout_graceful_shutdown = round(grace) + 2
        super().__init__(config)
        self._close, self._grace = close, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(self._close)
