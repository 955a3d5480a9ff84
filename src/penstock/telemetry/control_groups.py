"""What Linux's control groups leave a process of its machine's CPUs and memory."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_BOUND = 2**62  # what version 1 says is near to 2**63


class ControlGroup(NamedTuple):
    path: str
    cpus: float  # 0: no bound
    memory_bytes: int  # 0: no bound


def control_groups(root: Path = ROOT, own: Path = OWN) -> list[ControlGroup]:
    """The groups that this process is in and that bound it, its own first: each for all that are in it together.

    In a container the outermost is the container's. Of version 1 the memory's are told.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = (group for line in lines for group in _groups(root, *line.split(":", 2)[1:]))
    return [group for group in found if group.cpus or group.memory_bytes]


def usable_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """How many the process may keep busy: of those that it may run on, as many as its groups give it the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(group.cpus) for group in control_groups(root, own) if group.cpus)]))


def _groups(root: Path, controllers: str, path: str) -> Iterator[ControlGroup]:
    own = PurePosixPath(path)
    for each in (own, *own.parents):
        if controllers == "":
            folder = root / each.relative_to("/")
            yield ControlGroup(str(each), _cpus(folder), _bytes(folder / "memory.max"))
        elif "memory" in controllers.split(","):
            size_bytes = _bytes(root / "memory" / each.relative_to("/") / "memory.limit_in_bytes")
            yield ControlGroup(str(each), 0.0, size_bytes)


def _cpus(folder: Path) -> float:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return 0.0


def _bytes(file: Path) -> int:
    with suppress(OSError, ValueError):
        size_bytes = int(file.read_text())
        return size_bytes if size_bytes < NO_BOUND else 0
    return 0
