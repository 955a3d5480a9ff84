"""Process several items concurrently and return the results in the order of the items."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import Any, TypeVar

from penstock.core.errors import InvalidRequest

T = TypeVar("T")
R = TypeVar("R")


def check_window(window: int) -> None:
    if window < 1:
        raise InvalidRequest(f"window is {window}: it must be at least 1")


async def map_in_order(
    items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
) -> AsyncGenerator[R, None]:
    """Call `work` for several items at once, and yield the results in the order of the items.

    No further item is read while `window` items are being worked on or have results that wait to be read.
    """
    check_window(window)
    started: deque[asyncio.Task[R]] = deque()
    room = asyncio.Semaphore(window)
    changed = asyncio.Event()  # set when a task was started, or when all tasks have been started

    async def start_all() -> None:
        iterator = aiter(items)
        while True:
            await room.acquire()
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                return
            started.append(asyncio.create_task(work(item)))
            changed.set()

    reader = asyncio.create_task(start_all())
    reader.add_done_callback(lambda _: changed.set())
    try:
        while started or not reader.done():
            if started:
                result = await started[0]
                started.popleft()
                yield result
                room.release()
            else:
                changed.clear()
                await changed.wait()
        await reader
    finally:
        for task in (reader, *started):
            task.cancel()
        await asyncio.gather(reader, *started, return_exceptions=True)
