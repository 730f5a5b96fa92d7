"""What is kept in memory while there is room: the things used last, by a number of bytes."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Held"]

T = TypeVar("T")


class Held(Generic[T]):
    """A dictionary with a limit. For any thread.

    Args:
        limit: bytes; a thing that is larger by itself is not kept.

    >>> held = Held(10)
    >>> for name in "abc":
    ...     held.put(name, name.upper(), size=4)
    >>> held.get("a"), held.get("b"), held.size
    (None, 'B', 8)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._guard = threading.Lock()
        self.size = 0

    def get(self, key: str) -> T | None:
        """The thing, which counts as used now; None if it is not held."""
        with self._guard:
            if key not in self._things:
                return None
            self._things.move_to_end(key)
            return self._things[key][0]

    def put(self, key: str, thing: T, *, size: int) -> None:
        """Keep a thing of so many bytes, and let go of those used longest ago if there are too many."""
        with self._guard:
            self._forget(key)
            if size > self._limit:
                return
            self._things[key] = (thing, size)
            self.size += size
            while self.size > self._limit:
                _, (_, freed) = self._things.popitem(last=False)
                self.size -= freed

    def forget(self, key: str) -> None:
        """Let go of a thing, if it is held."""
        with self._guard:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self.size -= self._things.pop(key, (None, 0))[1]
