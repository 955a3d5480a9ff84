"""Lets tasks wait for a condition. Call `wake` after every change; it wakes the tasks whose condition is true."""

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

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[woken] = condition
            try:
                await woken
            finally:
                del self._waiting[woken]

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition is true; return False if it is still false after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_until(condition)
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        for woken, condition in self._waiting.items():
            if not woken.done() and condition():
                woken.set_result(None)
