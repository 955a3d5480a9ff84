"""Measures the memory and CPU time of a process and of all processes that it started.

Pages of files are not counted, because the system frees them when it needs memory.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_CHEAP = ("RssAnon", "RssShmem", "VmSwap")
_EXACT = ("Pss_Anon", "Pss_Shmem", "SwapPss")


def used_bytes(pid: int, not_its_own: int, exact_above: int) -> int:
    """Return the memory of a process and its descendants.

    `not_its_own`: shared memory that is counted elsewhere. `exact_above`: pages that processes share since a fork are
    counted only once if the total is above this number; that is slow, so a smaller total may be too high.
    """
    family = [pid, *descendants(pid)]
    total = _total_bytes([_read_rough_use(each) for each in family], not_its_own)
    if total <= exact_above or len(family) == 1:
        return total
    # A process that has ended uses nothing. If the exact use may not be read, the rough figure counts.
    exact = [_read_fields(f"/proc/{each}/smaps_rollup", _EXACT) or _read_rough_use(each) for each in family]
    return min(total, _total_bytes(exact, not_its_own))


class ChildrenUse(NamedTuple):
    pids: list[int]
    memory_bytes: int  # without memory that they share with each other or with the parent
    cpu_s: float


def children_use(pid: int) -> ChildrenUse:
    """Return the use of all descendants of a process."""
    pids = list(descendants(pid))
    memory = [_read_fields(f"/proc/{each}/status", ("RssAnon",)).get("RssAnon", 0) for each in pids]
    return ChildrenUse(pids, sum(memory), sum(map(_read_cpu_s, pids)))


def _read_cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # the process has ended
        return 0.0
    return sum(map(int, fields[11:13])) / _TICKS  # in user mode and in the kernel


def descendants(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(word) for word in file.read().split()]
            for child in children:
                yield child
                yield from descendants(child)
    except OSError:  # the process has ended, or the kernel does not list children
        pass


def _read_rough_use(pid: int) -> dict[str, int]:
    return _read_fields(f"/proc/{pid}/status", _CHEAP)


def _total_bytes(measured: list[dict[str, int]], not_its_own: int) -> int:
    private = shared = 0
    for found in measured:
        shared += sum(size for name, size in found.items() if name.endswith("Shmem"))
        private += sum(size for name, size in found.items() if not name.endswith("Shmem"))
    return private + max(0, shared - not_its_own)


def _read_fields(file: str, names: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        with open(file) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name in names:
                    found[name] = int(value.split()[0]) * 1024
    except OSError:  # the process has ended
        pass
    return found
