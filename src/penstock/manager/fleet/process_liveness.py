"""Detects processes that hang, from their heartbeats and CPU use. Pure: no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MAX_TICK_S = 1.0  # between two ticks; a longer gap means that the supervisor itself was not running
BUSY = 0.1  # of a core; a process that uses this much is working, even if it sends no heartbeats
WAITING_STATES = ("running", "disk-sleep")  # the process waits for a core or for the disk: the machine is overloaded
STOPPED = "stopped"  # by a signal

HangKind = Literal["silent", "loop"]


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """CPU time and state of a process, read from the kernel."""

    cpu_s: float  # since it started
    state: str


@dataclass(slots=True)
class _ProcessState:
    cpu_s: float = 0.0
    state: str = ""
    has_loop: bool = False  # the process has started its event loop
    silent_s: float = 0.0  # since the last heartbeat
    idle_s: float = 0.0  # part of `silent_s` in which the process did not work
    loop_s: float = 0.0  # how long the event loop had been blocked at the last heartbeat


@dataclass(frozen=True, slots=True)
class Hang:
    name: str
    kind: HangKind
    seconds: float


class ProcessLiveness:
    """Detects supervised processes that hang.

    A thread of each process sends heartbeats, which report for how long the event loop has been blocked. A process
    that neither sends heartbeats nor uses the CPU for `hang_s` is stopped or deadlocked. The limit is `loop_hang_s` for
    a busy event loop, for a heartbeat thread that cannot get the interpreter lock, and for a process that is starting.
    """

    def __init__(self, hang_s: float, loop_hang_s: float) -> None:
        self._hang_s, self._loop_hang_s = hang_s, loop_hang_s
        self._lives: dict[str, _ProcessState] = {}
        self._last: float | None = None

    def record_start(self, name: str) -> None:
        self._lives[name] = _ProcessState()

    def record_end(self, name: str) -> None:
        self._lives.pop(name, None)

    def record_heartbeat(self, name: str, loop_s: float | None) -> None:
        """Record a heartbeat. `loop_s`: how long the event loop has been blocked; None: the loop has not started."""
        if life := self._lives.get(name):
            life.has_loop, life.loop_s = loop_s is not None, loop_s or 0.0
            life.silent_s = life.idle_s = 0.0

    def tick(self, now: float, samples: Mapping[str, ProcessSample]) -> list[Hang]:
        """Return the processes that hang. Call this several times per second."""
        elapsed_s = 0.0 if self._last is None else min(MAX_TICK_S, now - self._last)
        self._last = now
        for name, sample in samples.items():
            if life := self._lives.get(name):
                is_idle = sample.cpu_s - life.cpu_s < BUSY * elapsed_s and sample.state not in WAITING_STATES
                life.silent_s += elapsed_s
                life.idle_s += elapsed_s if is_idle else 0.0
                life.cpu_s, life.state = sample.cpu_s, sample.state
        return [hang for name, life in self._lives.items() if (hang := self._find_hang(name, life))]

    def _find_hang(self, name: str, life: _ProcessState) -> Hang | None:
        if (life.has_loop or life.state == STOPPED) and life.idle_s >= self._hang_s:
            return Hang(name, "silent", life.silent_s)
        if life.silent_s >= self._loop_hang_s:
            return Hang(name, "silent", life.silent_s)
        if life.loop_s >= self._loop_hang_s:
            return Hang(name, "loop", life.loop_s)
        return None
