"""Those who wait until something is so: whoever changes anything wakes them, and only those for whom it is."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


class Waiters:
    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[woken] = is_so
            try:
                await woken
            finally:
                del self._waiting[woken]

    async def becomes(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until it is so, and returns whether it became so in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(is_so)
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        for woken, is_so in self._waiting.items():
            if not woken.done() and is_so():
                woken.set_result(None)
