"""Questions to all workers at once: who has not answered yet, and for how long to wait."""

import asyncio
from collections.abc import Iterable

import structlog

log = structlog.get_logger()
TIMEOUT_S = 1.0


class Queries:
    def __init__(self) -> None:
        self._open: dict[int, tuple[set[bytes], asyncio.Event]] = {}
        self._last_id = 0

    def ask(self, workers: Iterable[bytes]) -> int:
        self._last_id += 1
        self._open[self._last_id] = (set(workers), asyncio.Event())
        return self._last_id

    async def wait(self, query_id: int) -> None:
        """Until all have answered or are gone; one that does not answer in time is not waited for."""
        asked, answered = self._open[query_id]
        try:
            if asked:
                await asyncio.wait_for(answered.wait(), TIMEOUT_S)
        except TimeoutError:
            log.warning("statistics_late", workers=len(asked))
        finally:
            del self._open[query_id]

    def answered(self, query_id: int, worker: bytes) -> None:
        query = self._open.get(query_id)
        if query is not None:
            _tick_off(*query, worker)

    def left(self, worker: bytes) -> None:
        for asked, answered in self._open.values():
            _tick_off(asked, answered, worker)


def _tick_off(asked: set[bytes], answered: asyncio.Event, worker: bytes) -> None:
    asked.discard(worker)
    if not asked:
        answered.set()
