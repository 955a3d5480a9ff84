"""Which of a server's processes hang, from what they say and what they use. Decides; never looks and never acts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MOST_TURN_S = 1.0  # a turn that took longer is the watcher's own sleep: it says nothing of the others
AT_WORK = 0.1  # of a core: who uses it is busy, though it cannot speak
HELD_UP = ("running", "disk-sleep")  # waits for a core or for the disk: that is the machine's doing
STOPPED = "stopped"  # by a signal: whoever is starting does not start so

Why = Literal["silent", "loop"]


@dataclass(frozen=True, slots=True)
class Look:
    """What the kernel tells of a process."""

    cpu_s: float  # since it started
    state: str


@dataclass(slots=True)
class _Life:
    cpu_s: float = 0.0
    state: str = ""
    has_loop: bool = False  # it is past its start
    silent_s: float = 0.0  # since its last beat
    idle_s: float = 0.0  # of that, without work
    loop_s: float = 0.0  # for how long its event loop had not turned at its last beat


@dataclass(frozen=True, slots=True)
class Hang:
    name: str
    why: Why
    seconds: float


class Liveness:
    """A process beats by a thread of its own, and says with each beat for how long its event loop has not turned.

    Who neither beats nor works for `hang_s` is stopped or deadlocked. A loop that is busy, or a thread that does not
    get the interpreter, is no death: these have `loop_hang_s`, and so has a process that is starting.
    """

    def __init__(self, hang_s: float, loop_hang_s: float) -> None:
        self._hang_s, self._loop_hang_s = hang_s, loop_hang_s
        self._lives: dict[str, _Life] = {}
        self._last: float | None = None

    def started(self, name: str) -> None:
        self._lives[name] = _Life()

    def ended(self, name: str) -> None:
        self._lives.pop(name, None)

    def beaten(self, name: str, loop_s: float | None) -> None:
        """None: it has no loop yet."""
        if life := self._lives.get(name):
            life.has_loop, life.loop_s = loop_s is not None, loop_s or 0.0
            life.silent_s = life.idle_s = 0.0

    def turn(self, now: float, looks: Mapping[str, Look]) -> list[Hang]:
        """Called again and again."""
        elapsed_s = 0.0 if self._last is None else min(MOST_TURN_S, now - self._last)
        self._last = now
        for name, look in looks.items():
            if life := self._lives.get(name):
                is_idle = look.cpu_s - life.cpu_s < AT_WORK * elapsed_s and look.state not in HELD_UP
                life.silent_s += elapsed_s
                life.idle_s += elapsed_s if is_idle else 0.0
                life.cpu_s, life.state = look.cpu_s, look.state
        return [hang for name, life in self._lives.items() if (hang := self._judge(name, life))]

    def _judge(self, name: str, life: _Life) -> Hang | None:
        if (life.has_loop or life.state == STOPPED) and life.idle_s >= self._hang_s:
            return Hang(name, "silent", life.silent_s)
        if life.silent_s >= self._loop_hang_s:
            return Hang(name, "silent", life.silent_s)
        if life.loop_s >= self._loop_hang_s:
            return Hang(name, "loop", life.loop_s)
        return None
