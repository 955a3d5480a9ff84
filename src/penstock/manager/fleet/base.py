"""What fleets start, stop and watch: roles, with the resources that they need, and how these stand.

What ends or hangs is started again, where it was or on another machine, until it is stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "starting", "running"]


@dataclass(frozen=True, slots=True)
class RoleResources:
    """What a role takes of its machine; who places it on none that has less left."""

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetRole:
    """A role that is to run for as long as its fleet does, under the same name wherever that is."""

    name: str
    command: tuple[str, ...]  # what starts its process
    is_door: bool = False  # it says when it is open
    says_ready: bool = False  # it says whether it is ready, and why it is not
    resources: RoleResources = RoleResources()


@dataclass(frozen=True, slots=True)
class RoleStanding:
    name: str
    state: State  # `waiting`: no machine has it
    machine: str = ""
    pid: int = 0
    starts: int = 0  # of its process, where it is now
    places: Mapping[str, str] = field(default_factory=dict)  # its node, and the ports that were free there
