"""Several items at once: results in order, and no more in flight than the window allows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from penstock.client.ordered_results import map_in_order
from penstock.core.errors import InvalidRequest


class Source:
    """Numbers from 0, with a count of how many were requested."""

    def __init__(self, count: int, breaks_at: int | None = None) -> None:
        self.given = 0
        self._count = count
        self._breaks_at = breaks_at

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self._count):
            if number == self._breaks_at:
                raise OSError("the camera is gone")
            self.given += 1
            yield number


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def double(number: int) -> int:
    for _ in range((7 * number) % 5):  # items finish in another order
        await asyncio.sleep(0)
    return 2 * number


@pytest.mark.parametrize("window", [1, 3, 100])
async def test_results_keep_the_order(window: int) -> None:
    found = [result async for result in map_in_order(Source(40), double, window)]
    assert found == [2 * number for number in range(40)]


async def test_no_more_items_are_in_flight_than_the_window_allows() -> None:
    source = Source(100)
    async with aclosing(map_in_order(source, double, 4)) as results:
        assert await anext(results) == 0
        await settle()
        assert source.given == 4
        assert await anext(results) == 2
        await settle()
        assert source.given == 5


async def test_a_result_does_not_wait_for_the_next_item() -> None:
    async def one_and_silence() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async with aclosing(map_in_order(one_and_silence(), double, 4)) as results:
        assert await asyncio.wait_for(anext(results), 10) == 2


async def test_the_first_failure_ends_the_iteration_and_stops_the_others() -> None:
    stopped: list[int] = []

    async def work(number: int) -> int:
        if number == 1:
            raise InvalidRequest("bad")
        try:
            if number > 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(number)
            raise
        return number

    results = map_in_order(Source(100), work, 4)
    assert await anext(results) == 0
    with pytest.raises(InvalidRequest, match="bad"):
        await anext(results)
    assert stopped == [2, 3]


async def test_a_failing_source_ends_the_iteration_after_its_items() -> None:
    results = map_in_order(Source(10, breaks_at=3), double, 8)
    assert [await anext(results) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(OSError, match="camera"):
        await anext(results)


async def test_leaving_the_iteration_cancels_running_items() -> None:
    stopped: list[int] = []

    async def work(number: int) -> int:
        try:
            if number:
                await asyncio.Event().wait()
        finally:
            stopped.append(number)
        return number

    async with aclosing(map_in_order(Source(100), work, 3)) as results:
        assert await anext(results) == 0
        await settle()
    assert stopped == [0, 1, 2]


async def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="window is 0"):
        await anext(map_in_order(Source(1), double, 0))
