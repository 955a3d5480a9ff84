"""The lives of a cluster's workers: who is there, who is silent, who is gone. Decides; never acts.

A worker has an id that outlives it, an incarnation for each of its processes, and a stream for each time that it calls.
The newest stream of the newest incarnation speaks for it; what others say is not heard. Another process that comes
while one is heard is a stranger of the same name, and refused: two hosts were called alike. One that is silent is
suspect, then offline, then forgotten; whoever is heard again before that is taken back. Time in which the manager
itself did not turn is nobody's silence. One that comes and goes too often is alive, but gets nothing new that another
may have until it has stayed.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.core.errors import NameTaken

MAX_SUPERSEDED = 16  # incarnations of one worker that are remembered as past
MAX_RETURNS = 3  # within `flapping_s`, before a worker has to stay a while


class LifeState(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"  # silent: it keeps what it has, and gets nothing new
    OFFLINE = "offline"  # its blocks are placed elsewhere
    FORGOTTEN = "forgotten"


class LifeRules(NamedTuple):
    """Seconds."""

    suspect_s: float = 2.0  # of silence
    offline_s: float = 5.0  # of silence
    reconnect_s: float = 2.0  # what one whose stream ended gets to call again
    forget_s: float = 3600.0  # offline
    flapping_s: float = 60.0  # returns within this are counted, and one that returned too often stays as long
    most_turn_s: float = 1.0  # between two ticks; a longer one was the manager's own absence


# --- what happens


class WorkerArrived(NamedTuple):
    """The first report of a stream; streams are numbered as they come."""

    worker_id: str
    incarnation: str
    stream: int


class WorkerHeard(NamedTuple):
    worker_id: str
    stream: int


class WorkerStreamEnded(NamedTuple):
    worker_id: str
    stream: int
    has_left: bool = False  # it said that it leaves


class WorkerRemoved(NamedTuple):
    """An operator wants nothing more of this life of it."""

    worker_id: str


class LivesTurn(NamedTuple):
    """Time has passed: several times within `suspect_s`."""


LifeEvent = WorkerArrived | WorkerHeard | WorkerStreamEnded | WorkerRemoved | LivesTurn


# --- what follows


class LifeChanged(NamedTuple):
    worker_id: str
    state: LifeState
    is_open: bool  # it may get something new
    reason: str


class StreamRefused(NamedTuple):
    """Nothing of this stream counts any more: it is to be ended."""

    worker_id: str
    stream: int
    reason: str
    is_name_taken: bool = False  # a living worker has the name: this one may try again, when that is gone


LifeAction = LifeChanged | StreamRefused


@dataclass(slots=True)
class Life:
    incarnation: str
    stream: int
    heard: float  # in listened time, as all below
    state: LifeState = LifeState.ALIVE
    is_open: bool = True
    is_connected: bool = True
    since: float = 0.0  # of its state
    steady_from: float = 0.0  # one that flapped is given nothing before
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RETURNS))
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_SUPERSEDED))


class Lives:
    def __init__(self, rules: LifeRules, now: float) -> None:
        self._rules = rules
        self._lives: dict[str, Life] = {}
        self._turned = now
        self._listened_s = 0.0

    def get(self, worker_id: str) -> Life | None:
        return self._lives.get(worker_id)

    def items(self) -> dict[str, Life]:
        return self._lives

    @property
    def is_settled(self) -> bool:
        """Whoever was there when this manager began has had the time to call: who is missing is missing."""
        return self._listened_s >= self._rules.offline_s

    def silent_s(self, worker_id: str) -> float:
        return self._listened_s - self._lives[worker_id].heard

    def handle(self, event: LifeEvent, now: float) -> list[LifeAction]:
        self._listened_s += min(now - self._turned, self._rules.most_turn_s)
        self._turned = now
        match event:
            case WorkerArrived():
                return self._arrive(event)
            case WorkerHeard(worker_id, stream):
                life = self._speaking(worker_id, stream)
                return [] if life is None else self._hear(worker_id, life)
            case WorkerStreamEnded(worker_id, stream, has_left):
                life = self._speaking(worker_id, stream)
                return [] if life is None else self._end(worker_id, life, has_left)
            case WorkerRemoved(worker_id):
                return self._remove(worker_id)
            case LivesTurn():
                return [action for worker_id in list(self._lives) for action in self._turn(worker_id)]

    # --- what happens to one of them

    def _arrive(self, event: WorkerArrived) -> list[LifeAction]:
        worker_id, incarnation, stream = event
        life = self._lives.get(worker_id)
        if life is None:
            self._lives[worker_id] = Life(incarnation, stream, self._listened_s, since=self._listened_s)
            return [LifeChanged(worker_id, LifeState.ALIVE, True, "it joined")]
        if life.incarnation == incarnation:
            if stream < life.stream:
                return [StreamRefused(worker_id, stream, "a later stream of the same worker is there")]
            return [*self._leave_stream(worker_id, life, stream), *self._hear(worker_id, life)]
        if incarnation in life.superseded:
            return [StreamRefused(worker_id, stream, "a later process of this worker has taken its place")]
        if life.is_connected and life.state is LifeState.ALIVE:
            return [StreamRefused(worker_id, stream, NameTaken.of(worker_id).message, is_name_taken=True)]
        life.superseded.append(life.incarnation)
        life.incarnation = incarnation
        if life.state is LifeState.SUSPECT:
            self._count_return(life)
        actions = self._leave_stream(worker_id, life, stream)
        return [*actions, *self._hear(worker_id, life)]

    def _leave_stream(self, worker_id: str, life: Life, stream: int) -> list[LifeAction]:
        """Another stream speaks for it from now on."""
        before, had_one = life.stream, life.is_connected and life.stream != stream
        life.stream, life.is_connected, life.heard = stream, True, self._listened_s
        return [StreamRefused(worker_id, before, "the worker called again")] if had_one else []

    def _hear(self, worker_id: str, life: Life) -> list[LifeAction]:
        life.heard = self._listened_s
        if life.state is LifeState.ALIVE:
            return []
        was, life.state, life.since = life.state, LifeState.ALIVE, self._listened_s
        if was is LifeState.OFFLINE:
            self._count_return(life)
        life.is_open = self._is_steady(life)
        return [self._changed(worker_id, life, f"it was {was}, and is heard again")]

    def _end(self, worker_id: str, life: Life, has_left: bool) -> list[LifeAction]:
        if has_left:
            del self._lives[worker_id]
            return [LifeChanged(worker_id, LifeState.FORGOTTEN, False, "it left")]
        life.is_connected = False
        if life.state is not LifeState.ALIVE:
            return []
        return [self._fall(worker_id, life, LifeState.SUSPECT, "its connection ended")]

    def _remove(self, worker_id: str) -> list[LifeAction]:
        life = self._lives.pop(worker_id, None)
        if life is None:
            return []
        said = "an operator removed it"
        refused = [StreamRefused(worker_id, life.stream, said)] if life.is_connected else []
        return [LifeChanged(worker_id, LifeState.FORGOTTEN, False, said), *refused]

    def _turn(self, worker_id: str) -> list[LifeAction]:
        life = self._lives[worker_id]
        silent_s, rules = self._listened_s - life.heard, self._rules
        is_gone = not life.is_connected and self._listened_s - life.since >= rules.reconnect_s
        match life.state:
            case LifeState.ALIVE if silent_s >= rules.suspect_s:
                return [self._fall(worker_id, life, LifeState.SUSPECT, f"silent for {silent_s:.1f} s")]
            case LifeState.ALIVE if not life.is_open and self._is_steady(life):
                life.is_open = True
                return [self._changed(worker_id, life, "it has stayed")]
            case LifeState.SUSPECT if silent_s >= rules.offline_s or is_gone:
                return [self._fall(worker_id, life, LifeState.OFFLINE, f"silent for {silent_s:.1f} s")]
            case LifeState.OFFLINE if self._listened_s - life.since >= rules.forget_s:
                del self._lives[worker_id]
                refused = [StreamRefused(worker_id, life.stream, "forgotten")] if life.is_connected else []
                return [LifeChanged(worker_id, LifeState.FORGOTTEN, False, "offline for long"), *refused]
        return []

    # --- what the above is made of

    def _speaking(self, worker_id: str, stream: int) -> Life | None:
        life = self._lives.get(worker_id)
        return life if life is not None and life.stream == stream else None

    def _fall(self, worker_id: str, life: Life, state: LifeState, why: str) -> LifeChanged:
        life.state, life.since, life.is_open = state, self._listened_s, False
        return LifeChanged(worker_id, state, False, why)

    def _count_return(self, life: Life) -> None:
        """One that was silent for a moment, and lost nothing by it, was there."""
        now, flapping_s = self._listened_s, self._rules.flapping_s
        life.returns.append(now)
        if len(life.returns) == MAX_RETURNS and now - life.returns[0] < flapping_s:
            life.steady_from = now + flapping_s

    def _is_steady(self, life: Life) -> bool:
        return self._listened_s >= life.steady_from

    def _changed(self, worker_id: str, life: Life, why: str) -> LifeChanged:
        wait = "" if life.is_open else f"; it comes and goes, and gets little for {self._rules.flapping_s:g} s"
        return LifeChanged(worker_id, life.state, life.is_open, why + wait)
