"""Limits of one process: where several share them, each has its part of every limit."""

import time
from collections.abc import Callable

from penstock.storage.limits.base import Ask, Taken
from penstock.storage.limits.buckets import Buckets


class MemoryLimitStore:
    name = "memory"
    is_away = False
    errors = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets()
        self._clock = clock
        self._share = 1

    async def start(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """Nor to close."""

    def set_gateways(self, count: int) -> None:
        self._share = max(1, count)

    def take_now(self, ask: Ask) -> Taken | None:
        return self._take(ask)

    async def take(self, ask: Ask) -> Taken:
        return self._take(ask)

    def put(self, ask: Ask) -> None:
        if ask.spends:
            self._take(ask)

    def refusal(self, ask: Ask) -> Taken | None:
        return self._buckets.refusal(ask, self._clock(), self._share)

    def _take(self, ask: Ask) -> Taken:
        return self._buckets.take(ask, self._clock(), self._share)
