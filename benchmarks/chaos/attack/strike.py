"""What an attack is, and what it finds before it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server import ServerProcess


class Broken(Exception):
    """The server did not do what it must; says what."""


@dataclass(frozen=True, slots=True)
class Scene:
    server: ServerProcess
    folder: Path  # for files of this strike, and for servers of its own
    say: Callable[[str], None]

    def must(self, is_so: object, what: str) -> None:
        if not is_so:
            raise Broken(what)


@dataclass(frozen=True, slots=True)
class Attack:
    """`strike` returns when it is over, having looked at what it met; it raises `Broken`."""

    name: str
    strike: Callable[[Scene], Awaitable[None]]
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    neighbour_s: float = 2.0  # the longest that an honest caller may wait
    hang_s: float = 0.0  # and what noticing a process that hangs may add
    failures: int = 0  # of honest requests that it may cost: those that a killed process had in hand
    ends_processes: bool = False  # it kills, or has processes exchanged
