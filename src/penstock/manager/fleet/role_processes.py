"""The roles that a fleet starts, stops and watches: their commands, resources and status.

A process that ends or hangs is restarted, on the same or another machine, until it is stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "starting", "running"]


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The resources that a role needs; the role is placed only on a machine where these resources are free."""

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetRole:
    """A role that a fleet keeps running, under the same name on every machine."""

    name: str
    command: tuple[str, ...]  # command line of the role's process
    reports_open: bool = False  # the process reports when its endpoint is open
    reports_ready: bool = False  # the process reports whether it is ready, and why it is not
    resources: RoleResources = RoleResources()


@dataclass(frozen=True, slots=True)
class RoleStatus:
    name: str
    state: State  # `waiting`: not placed on a machine
    machine: str = ""
    pid: int = 0
    starts: int = 0  # of its process on the current machine
    places: Mapping[str, str] = field(default_factory=dict)  # node, host and ports of the process
