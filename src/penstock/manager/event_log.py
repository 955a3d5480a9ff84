"""Events of a cluster for operators; the metadata store keeps the latest events."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import structlog
from pydantic import ValidationError

from penstock.core.blocks import StoredValue
from penstock.core.error_text import shorten
from penstock.core.errors import Conflict, PenstockError
from penstock.manager.desired_state import EVENTS, DesiredState, encode
from penstock.manager.term import EventDraft
from penstock.storage.metadata.metadata_store import Compare, Write

log = structlog.get_logger()
E = TypeVar("E", bound=StoredValue)
MAX_EVENTS = 1000  # that the store keeps
MAX_WAITING = 256  # events that are not written yet; beyond this the oldest are dropped
MAX_BATCH = 32
# Sequence numbers that other managers leave free for the leader, because it does not check whether a number is taken.
AHEAD = 64
ROUTINE = ("leader", "worker_alive", "worker_suspect")  # kinds that occur at every start and stop, logged at debug
GATHER_S = 0.2
RETRY_S = 2.0


class Event(StoredValue):
    at: float  # seconds since 1970
    kind: str
    subject: str = ""
    text: str = ""


OnEvent = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    pass


class Commit(Protocol):
    """Writes to the metadata store, and returns when this manager has applied the change to its desired state."""

    async def __call__(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int: ...


class Events:
    def __init__(
        self,
        state: DesiredState,
        commit: Commit,
        add: Callable[[Sequence[Write]], Awaitable[None]],
        on_event: OnEvent = ignore_event,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the log. Only the leader may call `commit`; any manager may call `add`, which never overwrites."""
        self._state = state
        self._commit = commit
        self._add = add
        self._clock = clock
        self._waiting: deque[Event] = deque(maxlen=MAX_WAITING)
        self._has_waiting = asyncio.Event()
        self._numbering = asyncio.Lock()  # held until the desired state contains the numbered events
        self._on_event = on_event

    def emit(self, kind: str, subject: str, text: str) -> None:
        """Log an event that belongs to no commit, and queue the event for the metadata store."""
        event = self._create_event(EventDraft(kind, subject, text))
        self._waiting.append(event)
        self._has_waiting.set()
        self._publish(event)

    async def commit(
        self, writes: Sequence[Write], drafts: Iterable[EventDraft], compares: Sequence[Compare] = ()
    ) -> int:
        """Commit changes together with their events, so that no acknowledged change lacks its event."""
        events = [self._create_event(draft) for draft in drafts]
        async with self._numbering:
            revision = await self._commit([*writes, *self._plan_writes(events)], compares)
        for event in events:
            self._publish(event)
        return revision

    def read(
        self, after: int = 0, limit: int = 100, kind: str = "", subject: str = "", before: int = 0
    ) -> list[tuple[int, Event]]:
        """Return the newest matching events, oldest first, numbered above `after` and, if given, below `before`."""

        def is_wanted(event: Event) -> bool:
            return kind in ("", event.kind) and subject in ("", event.subject)

        return find_newest(self._state.events, Event, is_wanted, after, limit, before)

    async def write_batch(self) -> None:
        """Wait for queued events and write a batch of events. Every manager writes its own events."""
        if not self._waiting:
            self._has_waiting.clear()
            await self._has_waiting.wait()
            await asyncio.sleep(GATHER_S)
        batch = list(islice(self._waiting, MAX_BATCH))
        try:
            async with self._numbering:
                await self._add(self._plan_writes(batch, AHEAD))
        except Conflict:
            await asyncio.sleep(GATHER_S)
        except PenstockError as error:
            log.warning("writing_events_failed", error=error.message)
            await asyncio.sleep(RETRY_S)
        else:
            for event in batch:
                if self._waiting and self._waiting[0] is event:
                    self._waiting.popleft()

    def _create_event(self, draft: EventDraft) -> Event:
        return Event(at=self._clock(), kind=draft.kind, subject=draft.subject, text=shorten(draft.text))

    def _publish(self, event: Event) -> None:
        report = log.debug if event.kind in ROUTINE else log.info
        report("event", kind=event.kind, subject=event.subject, text=event.text)
        self._on_event(event)

    def _plan_writes(self, batch: Sequence[Event], ahead: int = 0) -> list[Write]:
        numbers = sorted(self._state.events)
        first = (numbers[-1] if numbers else 0) + 1 + ahead
        excess = len(numbers) + len(batch) - MAX_EVENTS
        new = [Write(_make_event_key(first + index), encode(event), may_wait=True) for index, event in enumerate(batch)]
        return [
            *new,
            *(Write(_make_event_key(number), None, may_wait=True) for number in numbers[: max(0, min(excess, 64))]),
        ]


def _make_event_key(number: int) -> str:
    return f"{EVENTS}{number:020}"


def find_newest(
    entries: Mapping[int, bytes],
    entry_type: type[E],
    is_wanted: Callable[[E], bool],
    after: int,
    limit: int,
    before: int,
) -> list[tuple[int, E]]:
    """Return the newest entries for which `is_wanted`, oldest first, numbered above `after` and below `before`."""
    found: list[tuple[int, E]] = []
    for number in sorted(entries, reverse=True):
        if number <= after or len(found) == limit:
            break
        if before and number >= before:
            continue
        try:
            entry = entry_type.model_validate_json(entries[number])
        except ValidationError:
            continue  # written by another version of Penstock
        if is_wanted(entry):
            found.append((number, entry))
    return found[::-1]
