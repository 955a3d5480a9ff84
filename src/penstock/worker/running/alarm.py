"""A timer on the event loop for the next of many times."""

import asyncio
import time
from collections.abc import Callable
from math import inf

now = time.monotonic


class Alarm:
    """Goes off once, at the earliest of the times that it was set to since it last did."""

    def __init__(self, ring: Callable[[], None], least_s: float = 0.0) -> None:
        """`least_s`: it does not go off sooner than this after it was set."""
        self._ring = ring
        self._least_s = least_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.at = inf

    def set(self, at: float) -> None:
        if at < self.at:
            self.cancel()
            self.at = at
            self._timer = self._loop.call_later(max(self._least_s, at - now()), self._go_off)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.at = None, inf

    def _go_off(self) -> None:
        self._timer, self.at = None, inf
        self._ring()
