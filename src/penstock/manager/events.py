"""What happened in a cluster, for operators: kept in the metadata store, the latest of it."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import structlog
from pydantic import ValidationError

from penstock.core.blocks import StoredValue
from penstock.core.error_text import shorten
from penstock.core.errors import PenstockError
from penstock.manager.desired import EVENTS, DesiredState, encode
from penstock.storage.metadata.base import Write

log = structlog.get_logger()
MAX_EVENTS = 1000  # that are kept
MAX_WAITING = 256  # that are not written yet; the oldest go
MAX_BATCH = 32
GATHER_S = 0.2
RETRY_S = 2.0


class Event(StoredValue):
    at: float  # seconds since 1970
    kind: str
    subject: str = ""
    text: str = ""


class Events:
    def __init__(
        self,
        state: DesiredState,
        commit: Callable[[Sequence[Write]], Awaitable[int]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._commit = commit
        self._clock = clock
        self._waiting: deque[Event] = deque(maxlen=MAX_WAITING)
        self._told = asyncio.Event()
        self.on_event: list[Callable[[Event], None]] = []

    def tell(self, kind: str, subject: str, text: str) -> None:
        text = shorten(text)
        log.info("event", kind=kind, subject=subject, text=text)
        event = Event(at=self._clock(), kind=kind, subject=subject, text=text)
        self._waiting.append(event)
        self._told.set()
        for listener in self.on_event:
            listener(event)

    def read(self, after: int = 0, limit: int = 100, kind: str = "", subject: str = "") -> list[tuple[int, Event]]:
        """The newest of those that match, oldest first."""
        found: list[tuple[int, Event]] = []
        for number in sorted(self._state.events, reverse=True):
            if number <= after or len(found) == limit:
                break
            try:
                event = Event.model_validate_json(self._state.events[number])
            except ValidationError:
                continue  # of another version of Penstock
            if kind in ("", event.kind) and subject in ("", event.subject):
                found.append((number, event))
        return found[::-1]

    async def write_forever(self) -> None:
        """For as long as this manager leads."""
        while True:
            await self._told.wait()
            await asyncio.sleep(GATHER_S)
            self._told.clear()
            while self._waiting:
                batch = [self._waiting[index] for index in range(min(MAX_BATCH, len(self._waiting)))]
                try:
                    await self._commit(self._plan(batch))
                except PenstockError as error:
                    log.warning("events_not_kept", error=error.message)
                    await asyncio.sleep(RETRY_S)
                    continue
                for event in batch:
                    if self._waiting and self._waiting[0] is event:
                        self._waiting.popleft()

    def _plan(self, batch: Sequence[Event]) -> list[Write]:
        numbers = sorted(self._state.events)
        first = numbers[-1] + 1 if numbers else 1
        excess = len(numbers) + len(batch) - MAX_EVENTS
        new = [Write(_key(first + index), encode(event), may_wait=True) for index, event in enumerate(batch)]
        return [*new, *(Write(_key(number), None, may_wait=True) for number in numbers[: max(0, min(excess, 64))])]


def _key(number: int) -> str:
    return f"{EVENTS}{number:020}"
