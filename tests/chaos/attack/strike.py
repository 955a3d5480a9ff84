"""An attack, and the server that it attacks."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server import ServerProcess

GROWTH_MIB = 600  # of one process, by any attack


class Broken(Exception):
    """An error of the server; the message says which rule it broke."""


@dataclass(frozen=True, slots=True)
class Scene:
    server: ServerProcess
    folder: Path  # for files of this attack, and for servers of its own
    say: Callable[[str], None]
    is_behind_edge: bool = False  # Envoy may refuse what is invalid by itself, with other statuses or by closing

    def must(self, is_so: object, what: str) -> None:
        if not is_so:
            raise Broken(what)


@dataclass(frozen=True, slots=True)
class Attack:
    """`strike` returns after checking the answers; it raises `Broken`."""

    name: str
    strike: Callable[[Scene], Awaitable[None]]
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    neighbour_s: float = 2.0  # the longest time that an honest caller may wait
    hang_s: float = 0.0  # and the time that detecting a hanging process may add
    growth_mib: float = GROWTH_MIB  # of one process
    failures: int = 0  # honest requests that it may fail: those of a killed process
    ends_processes: bool = False  # it kills or replaces processes
