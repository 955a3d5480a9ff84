"""Limits log lines that clients could cause at any rate: at most one line per event and period."""

import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()
PERIOD_S = 10.0


class RepeatedLog:
    """Logs an event as a warning at most once per period, with the number of occurrences since the last line."""

    def __init__(self, event: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._clock = clock
        self._next_at: float | None = None  # None: not logged yet
        self._count = 0  # since the last line

    def add(self, count: int = 1, **fields: object) -> None:
        self._count += count
        now = self._clock()
        if self._next_at is None or now >= self._next_at:
            log.warning(self._event, count=self._count, **fields)
            self._next_at, self._count = now + PERIOD_S, 0
