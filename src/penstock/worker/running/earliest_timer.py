"""A timer on the event loop for the earliest of several times."""

import asyncio
import time
from collections.abc import Callable
from math import inf

now = time.monotonic


class EarliestTimer:
    """Calls `ring` once, at the earliest of the times that were set since the last call."""

    def __init__(self, ring: Callable[[], None], least_s: float = 0.0) -> None:
        """`least_s`: the shortest time between `set` and the call of `ring`."""
        self._ring = ring
        self._least_s = least_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.at = inf

    def set(self, at: float) -> None:
        if at < self.at:
            self.cancel()
            self.at = at
            self._timer = self._loop.call_later(max(self._least_s, at - now()), self._ring_now)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.at = None, inf

    def _ring_now(self) -> None:
        self._timer, self.at = None, inf
        self._ring()
