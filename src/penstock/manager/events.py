"""What happened in a cluster, for operators: kept in the metadata store, the latest of it."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import structlog
from pydantic import ValidationError

from penstock.core.blocks import StoredValue
from penstock.core.error_text import shorten
from penstock.core.errors import Conflict, PenstockError
from penstock.manager.desired import EVENTS, DesiredState, encode
from penstock.manager.reign import Notice
from penstock.storage.metadata.base import Compare, Write

log = structlog.get_logger()
E = TypeVar("E", bound=StoredValue)
MAX_EVENTS = 1000  # that are kept
MAX_WAITING = 256  # that are not written yet; the oldest go
MAX_BATCH = 32
AHEAD = 64  # numbers that are left to who leads: it does not look whether another takes them meanwhile
GATHER_S = 0.2
RETRY_S = 2.0


class Event(StoredValue):
    at: float  # seconds since 1970
    kind: str
    subject: str = ""
    text: str = ""


class Commit(Protocol):
    """Returns when what was written is folded."""

    async def __call__(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int: ...


class Events:
    def __init__(
        self,
        state: DesiredState,
        commit: Commit,
        keep: Callable[[Sequence[Write]], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`commit` is for who leads; `keep` for every manager, and raises Conflict where one of these was written."""
        self._state = state
        self._commit = commit
        self._keep = keep
        self._clock = clock
        self._waiting: deque[Event] = deque(maxlen=MAX_WAITING)
        self._told = asyncio.Event()
        self._numbering = asyncio.Lock()  # until the numbers are folded
        self.on_event: list[Callable[[Event], None]] = []

    def tell(self, kind: str, subject: str, text: str) -> None:
        """Of what nobody has asked for: it is written soon."""
        event = self._make(Notice(kind, subject, text))
        self._waiting.append(event)
        self._told.set()
        self._publish(event)

    async def commit(self, writes: Sequence[Write], notices: Iterable[Notice], compares: Sequence[Compare] = ()) -> int:
        """Writes, and with it the events of it: what was acknowledged is told, whoever dies."""
        events = [self._make(notice) for notice in notices]
        async with self._numbering:
            revision = await self._commit([*writes, *self._plan(events)], compares)
        for event in events:
            self._publish(event)
        return revision

    def read(
        self, after: int = 0, limit: int = 100, kind: str = "", subject: str = "", before: int = 0
    ) -> list[tuple[int, Event]]:
        """The newest of those that match, oldest first; `before`: only older ones."""

        def is_wanted(event: Event) -> bool:
            return kind in ("", event.kind) and subject in ("", event.subject)

        return newest(self._state.events, Event, is_wanted, after, limit, before)

    async def write_forever(self) -> None:
        """Also where another leads: what was done here is told from here."""
        while True:
            await self._told.wait()
            await asyncio.sleep(GATHER_S)
            self._told.clear()
            while self._waiting:
                batch = [self._waiting[index] for index in range(min(MAX_BATCH, len(self._waiting)))]
                try:
                    async with self._numbering:
                        await self._keep(self._plan(batch, AHEAD))
                except Conflict:
                    await asyncio.sleep(GATHER_S)
                    continue
                except PenstockError as error:
                    log.warning("events_not_kept", error=error.message)
                    await asyncio.sleep(RETRY_S)
                    continue
                for event in batch:
                    if self._waiting and self._waiting[0] is event:
                        self._waiting.popleft()

    def _make(self, notice: Notice) -> Event:
        return Event(at=self._clock(), kind=notice.kind, subject=notice.subject, text=shorten(notice.text))

    def _publish(self, event: Event) -> None:
        log.info("event", kind=event.kind, subject=event.subject, text=event.text)
        for listener in self.on_event:
            listener(event)

    def _plan(self, batch: Sequence[Event], ahead: int = 0) -> list[Write]:
        numbers = sorted(self._state.events)
        first = (numbers[-1] if numbers else 0) + 1 + ahead
        excess = len(numbers) + len(batch) - MAX_EVENTS
        new = [Write(_key(first + index), encode(event), may_wait=True) for index, event in enumerate(batch)]
        return [*new, *(Write(_key(number), None, may_wait=True) for number in numbers[: max(0, min(excess, 64))])]


def _key(number: int) -> str:
    return f"{EVENTS}{number:020}"


def newest(
    entries: Mapping[int, bytes], kind: type[E], is_wanted: Callable[[E], bool], after: int, limit: int, before: int
) -> list[tuple[int, E]]:
    """Of what is kept by number, the newest that are wanted, oldest first; `before`: only older ones."""
    found: list[tuple[int, E]] = []
    for number in sorted(entries, reverse=True):
        if number <= after or len(found) == limit:
            break
        if before and number >= before:
            continue
        try:
            entry = kind.model_validate_json(entries[number])
        except ValidationError:
            continue  # of another version of Penstock
        if is_wanted(entry):
            found.append((number, entry))
    return found[::-1]
