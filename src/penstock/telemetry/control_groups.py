"""CPU and memory limits that Linux control groups set for this process."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 2**62  # version 1 writes a value near 2**63 for "no limit"


class ControlGroup(NamedTuple):
    path: str
    cpus: float  # 0: no limit
    memory_bytes: int  # 0: no limit


def list_control_groups(root: Path = ROOT, own: Path = OWN) -> list[ControlGroup]:
    """Return the control groups that limit this process, innermost first. All processes of a group share its limits.

    In a container the outermost group is the container's. For version 1 only memory limits are returned.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = (group for line in lines for group in _read_groups(root, *line.split(":", 2)[1:]))
    return [group for group in found if group.cpus or group.memory_bytes]


def count_usable_cores(root: Path = ROOT, own: Path = OWN) -> int:
    """Return the number of cores that the process can use: its CPU affinity, within its control groups' quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(group.cpus) for group in list_control_groups(root, own) if group.cpus)]))


def _read_groups(root: Path, controllers: str, path: str) -> Iterator[ControlGroup]:
    own = PurePosixPath(path)
    for each in (own, *own.parents):
        if controllers == "":
            folder = root / each.relative_to("/")
            yield ControlGroup(str(each), _read_cpu_quota(folder), _read_byte_count(folder / "memory.max"))
        elif "memory" in controllers.split(","):
            size_bytes = _read_byte_count(root / "memory" / each.relative_to("/") / "memory.limit_in_bytes")
            yield ControlGroup(str(each), 0.0, size_bytes)


def _read_cpu_quota(folder: Path) -> float:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return 0.0


def _read_byte_count(file: Path) -> int:
    with suppress(OSError, ValueError):
        size_bytes = int(file.read_text())
        return size_bytes if size_bytes < NO_LIMIT else 0
    return 0
