"""An attack, and the server that it attacks."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server import ServerProcess

GROWTH_MIB = 600  # allowed memory growth of one process


class Broken(Exception):
    """The server violated a rule, which the message names."""


@dataclass(frozen=True, slots=True)
class Scene:
    server: ServerProcess
    folder: Path  # scratch space of this attack
    say: Callable[[str], None]
    is_behind_edge: bool = False  # then Envoy refuses invalid requests itself, with other statuses or by closing

    def must(self, is_so: object, what: str) -> None:
        if not is_so:
            raise Broken(what)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack. `strike` performs it and checks the answers; it raises `Broken` if the server misbehaves."""

    name: str
    strike: Callable[[Scene], Awaitable[None]]
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    neighbour_s: float = 2.0  # maximum time that an honest caller may wait
    hang_s: float = 0.0  # additional time allowed for detecting a hanging process
    growth_mib: float = GROWTH_MIB  # of one process
    failures: int = 0  # honest requests that may fail because their process is killed
    ends_processes: bool = False  # True: the attack kills or replaces processes
