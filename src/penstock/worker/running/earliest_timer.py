"""A timer on the event loop for the earliest of several times."""

import asyncio
import time
from collections.abc import Callable
from math import inf

now = time.monotonic


class EarliestTimer:
    """Calls `callback` once, at the earliest of the times that were set since the previous call."""

    def __init__(self, callback: Callable[[], None], least_s: float = 0.0) -> None:
        """`least_s`: the shortest time between `set` and the call of `callback`."""
        self._callback = callback
        self._least_s = least_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.due_at = inf

    def set(self, due_at: float) -> None:
        if due_at < self.due_at:
            self.cancel()
            self.due_at = due_at
            self._timer = self._loop.call_later(max(self._least_s, due_at - now()), self._call_back)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.due_at = None, inf

    def _call_back(self) -> None:
        self._timer, self.due_at = None, inf
        self._callback()
