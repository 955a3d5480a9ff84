"""What Linux's control groups (version 2) leave a process of its machine's CPUs and memory."""

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class ControlGroup(NamedTuple):
    path: str
    cpus: float  # 0: no bound
    memory_bytes: int  # 0: no bound


def control_groups(root: Path = ROOT, own: Path = OWN) -> list[ControlGroup]:
    """The groups that this process is in and that bound it, its own first: each for all that are in it together.

    In a container the outermost is the container's.
    """
    try:
        line = next(line for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return []
    path = PurePosixPath(line.removeprefix("0::"))
    found = [ControlGroup(str(each), *_bounds(root / each.relative_to("/"))) for each in (path, *path.parents)]
    return [group for group in found if group.cpus or group.memory_bytes]


def _bounds(folder: Path) -> tuple[float, int]:
    cpus, memory_bytes = 0.0, 0
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        cpus = int(quota) / int(period)
    with suppress(OSError, ValueError):
        memory_bytes = int((folder / "memory.max").read_text())
    return cpus, memory_bytes
