"""Laws of work that several wait for."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dodo.serving.shared import Shared


class Work:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.begun, self.ended, self.go = 0, 0, asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return self.begun


def run(law: Callable[[Shared[int], Work], Awaitable[None]]) -> None:
    async def whole() -> None:
        await law(Shared(), Work())

    asyncio.run(whole())


def waiting(shared: Shared[int], work: Work, count: int, key: str = "a") -> list[asyncio.Task[int]]:
    return [asyncio.create_task(shared.get(key, work)) for _ in range(count)]


def test_work_is_done_once_for_all_who_wait_and_again_for_who_comes_later() -> None:
    async def law(shared: Shared[int], work: Work) -> None:
        tasks = waiting(shared, work, 3)
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(*tasks) == [1, 1, 1]
        assert await shared.get("a", work) == 2

    run(law)


def test_other_keys_are_other_work() -> None:
    async def law(shared: Shared[int], work: Work) -> None:
        tasks = waiting(shared, work, 1) + waiting(shared, work, 1, "b")
        work.go.set()
        await asyncio.gather(*tasks)
        assert work.begun == 2

    run(law)


def test_it_goes_on_until_the_last_one_leaves() -> None:
    async def law(shared: Shared[int], work: Work) -> None:
        first, second = waiting(shared, work, 2)
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert (work.begun, work.ended) == (1, 0)
        second.cancel()
        await asyncio.sleep(0.01)
        assert (work.begun, work.ended) == (1, 1)
        assert first.cancelled() and second.cancelled()
        work.go.set()
        assert await shared.get("a", work) == 2

    run(law)


def test_who_comes_as_the_last_one_leaves_gets_work_of_his_own() -> None:
    async def law(shared: Shared[int], work: Work) -> None:
        (first,) = waiting(shared, work, 1)
        await asyncio.sleep(0.01)
        first.cancel()
        (second,) = waiting(shared, work, 1)
        await asyncio.sleep(0.01)
        work.go.set()
        assert await second == 2

    run(law)


def test_what_goes_wrong_goes_wrong_for_all_and_is_tried_again() -> None:
    async def law(shared: Shared[int], work: Work) -> None:
        async def failing() -> int:
            await work.go.wait()
            raise ValueError("no")

        tasks = [asyncio.create_task(shared.get("a", failing)) for _ in range(2)]
        await asyncio.sleep(0)
        work.go.set()
        for task in tasks:
            with pytest.raises(ValueError, match="no"):
                await task
        assert await shared.get("a", work) == 1

    run(law)
