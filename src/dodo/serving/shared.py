"""Work that several wait for and that is done once."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Shared"]

T = TypeVar("T")


@dataclass
class _Going(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class Shared(Generic[T]):
    """Work by key: what is going on is waited for, not begun again, and ends when nobody waits for it any more.

    For one event loop.
    """

    def __init__(self) -> None:
        self._going: dict[str, _Going[T]] = {}

    async def get(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What comes of the work; begins it if it is not going on.

        Raises:
            Exception: what the work raised, to each who waits.
        """
        going = self._going.get(key)
        if going is None:
            going = self._going[key] = _Going(asyncio.create_task(work()))
        going.waiting += 1
        try:
            return await asyncio.shield(going.task)
        finally:
            going.waiting -= 1
            if not going.waiting:
                going.task.cancel()
                self._going.pop(key, None)
