"""The liveness of workers: alive, suspect, offline or forgotten. Pure: no I/O.

A worker has an id that is the same for all its processes, an incarnation per process, and a stream per connection to
the manager. Only the newest stream of the newest incarnation counts; other streams are ignored. A process that attaches
while another process of the worker reports is refused, because two hosts have the same name. A silent worker becomes
suspect, then offline, then forgotten; a worker that reports before it is forgotten becomes alive again. Time in which
the manager itself was not running does not count as silence. A flapping worker, which disconnects and returns too
often, is alive, but gets new blocks only if no other worker can hold them, until it has stayed connected for a while.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.core.errors import NameTaken

MAX_SUPERSEDED = 16  # past incarnations that are remembered per worker
MAX_RETURNS = 3  # returns within `flapping_s` that make a worker a flapping one


class LivenessState(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent; keeps its blocks and gets no new blocks
    OFFLINE = "offline"  # its blocks are placed elsewhere
    FORGOTTEN = "forgotten"


class LivenessRules(NamedTuple):
    """Time limits of a worker's states."""

    suspect_s: float = 2.0  # silence after which a worker is suspect
    offline_s: float = 5.0  # silence after which a worker is offline
    reconnect_s: float = 2.0  # for a worker to attach again after its stream ended
    forget_s: float = 3600.0  # time offline after which a worker is forgotten
    flapping_s: float = 60.0  # time over which returns are counted, and for which a flapping worker gets no new blocks
    max_tick_s: float = 1.0  # between two ticks; if the gap is longer, the manager itself was not running


# --- events


class WorkerArrived(NamedTuple):
    """The first report of a worker's stream; streams are numbered in the order in which they open."""

    worker_id: str
    incarnation: str
    stream: int


class WorkerReported(NamedTuple):
    worker_id: str
    stream: int


class WorkerStreamEnded(NamedTuple):
    worker_id: str
    stream: int
    has_left: bool = False  # the worker announced that it leaves


class WorkerRemoved(NamedTuple):
    """An operator removed this incarnation of the worker."""

    worker_id: str


class LivenessTick(NamedTuple):
    """A tick of the clock, sent several times within `suspect_s`."""


LivenessEvent = WorkerArrived | WorkerReported | WorkerStreamEnded | WorkerRemoved | LivenessTick


# --- actions


class LivenessChanged(NamedTuple):
    worker_id: str
    state: LivenessState
    is_open: bool  # may get new blocks
    reason: str


class StreamRefused(NamedTuple):
    """A worker's stream that the manager ignores and must end."""

    worker_id: str
    stream: int
    reason: str
    is_name_taken: bool = False  # a live worker has the same name; the refused worker may try again later


LivenessAction = LivenessChanged | StreamRefused


@dataclass(slots=True)
class LivenessRecord:
    """The liveness of one worker: its process, its stream of reports, and its state."""

    incarnation: str
    stream: int
    reported_at: float  # time of the last report; all times here count only time in which the manager was running
    since: float  # when the current state started
    state: LivenessState = LivenessState.ALIVE
    is_open: bool = True
    is_connected: bool = True
    steady_from: float = 0.0  # a flapping worker gets no new blocks until this time
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RETURNS))
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_SUPERSEDED))


class WorkerLiveness:
    def __init__(self, rules: LivenessRules, now: float) -> None:
        self._rules = rules
        self._records: dict[str, LivenessRecord] = {}
        self._last_at = now
        self._running_s = 0.0  # time in which the manager was running

    def get(self, worker_id: str) -> LivenessRecord | None:
        return self._records.get(worker_id)

    def get_records(self) -> dict[str, LivenessRecord]:
        return self._records

    @property
    def is_settled(self) -> bool:
        """Return whether the workers of the previous leader have had enough time to attach."""
        return self._running_s >= self._rules.offline_s

    def compute_silent_s(self, worker_id: str) -> float:
        return self._running_s - self._records[worker_id].reported_at

    def handle(self, event: LivenessEvent, now: float) -> list[LivenessAction]:
        self._running_s += min(now - self._last_at, self._rules.max_tick_s)
        self._last_at = now
        match event:
            case WorkerArrived():
                return self._handle_arrival(event)
            case WorkerReported(worker_id, stream):
                record = self._find_record(worker_id, stream)
                return [] if record is None else self._apply_report(worker_id, record)
            case WorkerStreamEnded(worker_id, stream, has_left):
                record = self._find_record(worker_id, stream)
                return [] if record is None else self._end_stream(worker_id, record, has_left)
            case WorkerRemoved(worker_id):
                return self._remove(worker_id)
            case LivenessTick():
                return [action for worker_id in list(self._records) for action in self._tick(worker_id)]

    # --- events of one worker

    def _handle_arrival(self, event: WorkerArrived) -> list[LivenessAction]:
        worker_id, incarnation, stream = event
        record = self._records.get(worker_id)
        if record is None:
            self._records[worker_id] = LivenessRecord(incarnation, stream, self._running_s, self._running_s)
            return [LivenessChanged(worker_id, LivenessState.ALIVE, True, "worker joined")]
        if record.incarnation == incarnation:
            if stream < record.stream:
                return [StreamRefused(worker_id, stream, "the worker has opened a newer stream")]
            return [*self._replace_stream(worker_id, record, stream), *self._apply_report(worker_id, record)]
        if incarnation in record.superseded:
            return [StreamRefused(worker_id, stream, "a newer process of this worker has replaced this one")]
        if record.is_connected and record.state is LivenessState.ALIVE:
            return [StreamRefused(worker_id, stream, NameTaken.for_role(worker_id).message, is_name_taken=True)]
        record.superseded.append(record.incarnation)
        record.incarnation = incarnation
        if record.state is LivenessState.SUSPECT:
            self._count_return(record)
        actions = self._replace_stream(worker_id, record, stream)
        return [*actions, *self._apply_report(worker_id, record)]

    def _replace_stream(self, worker_id: str, record: LivenessRecord, stream: int) -> list[LivenessAction]:
        """Make this stream the worker's current stream, and end the stream that it replaces."""
        before, had_one = record.stream, record.is_connected and record.stream != stream
        record.stream, record.is_connected = stream, True
        return [StreamRefused(worker_id, before, "the worker has opened a newer stream")] if had_one else []

    def _apply_report(self, worker_id: str, record: LivenessRecord) -> list[LivenessAction]:
        record.reported_at = self._running_s
        if record.state is LivenessState.ALIVE:
            return []
        was, record.state, record.since = record.state, LivenessState.ALIVE, self._running_s
        if was is LivenessState.OFFLINE:
            self._count_return(record)
        record.is_open = self._is_stable(record)
        return [self._build_change(worker_id, record, f"worker is back (was {was})")]

    def _end_stream(self, worker_id: str, record: LivenessRecord, has_left: bool) -> list[LivenessAction]:
        if has_left:
            del self._records[worker_id]
            return [LivenessChanged(worker_id, LivenessState.FORGOTTEN, False, "worker left")]
        record.is_connected = False
        if record.state is not LivenessState.ALIVE:
            return []
        return [self._degrade(worker_id, record, LivenessState.SUSPECT, "connection lost")]

    def _remove(self, worker_id: str) -> list[LivenessAction]:
        record = self._records.pop(worker_id, None)
        if record is None:
            return []
        reason = "worker removed by an operator"
        refused = [StreamRefused(worker_id, record.stream, reason)] if record.is_connected else []
        return [LivenessChanged(worker_id, LivenessState.FORGOTTEN, False, reason), *refused]

    def _tick(self, worker_id: str) -> list[LivenessAction]:
        record = self._records[worker_id]
        silent_s, rules = self._running_s - record.reported_at, self._rules
        is_gone = not record.is_connected and self._running_s - record.since >= rules.reconnect_s
        match record.state:
            case LivenessState.ALIVE if silent_s >= rules.suspect_s:
                return [self._degrade(worker_id, record, LivenessState.SUSPECT, f"no report for {silent_s:.1f} s")]
            case LivenessState.ALIVE if not record.is_open and self._is_stable(record):
                record.is_open = True
                return [self._build_change(worker_id, record, "worker is stable again and gets new blocks")]
            case LivenessState.SUSPECT if silent_s >= rules.offline_s or is_gone:
                return [self._degrade(worker_id, record, LivenessState.OFFLINE, f"no report for {silent_s:.1f} s")]
            case LivenessState.OFFLINE if self._running_s - record.since >= rules.forget_s:
                del self._records[worker_id]
                reason = f"offline for {rules.forget_s:g} s"
                refused = [StreamRefused(worker_id, record.stream, reason)] if record.is_connected else []
                return [LivenessChanged(worker_id, LivenessState.FORGOTTEN, False, reason), *refused]
        return []

    # --- helpers

    def _find_record(self, worker_id: str, stream: int) -> LivenessRecord | None:
        """Return the worker's record if `stream` is the worker's current stream, else None."""
        record = self._records.get(worker_id)
        return record if record is not None and record.stream == stream else None

    def _degrade(self, worker_id: str, record: LivenessRecord, state: LivenessState, reason: str) -> LivenessChanged:
        record.state, record.since, record.is_open = state, self._running_s, False
        return LivenessChanged(worker_id, state, False, reason)

    def _count_return(self, record: LivenessRecord) -> None:
        """Count the return of a worker that was offline or restarted; callers do not count a short silence."""
        now, flapping_s = self._running_s, self._rules.flapping_s
        record.returns.append(now)
        if len(record.returns) == MAX_RETURNS and now - record.returns[0] < flapping_s:
            record.steady_from = now + flapping_s

    def _is_stable(self, record: LivenessRecord) -> bool:
        return self._running_s >= record.steady_from

    def _build_change(self, worker_id: str, record: LivenessRecord, reason: str) -> LivenessChanged:
        """Return the change of a worker's state, with a note if the worker is flapping."""
        wait = f"; it restarts or disconnects too often and gets no new blocks for {self._rules.flapping_s:g} s"
        return LivenessChanged(worker_id, record.state, record.is_open, reason if record.is_open else reason + wait)
