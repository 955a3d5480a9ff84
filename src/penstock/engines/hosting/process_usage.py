"""Measures the memory and CPU time of a process and of all processes that it started.

Pages of files are not counted, because the system frees them when it needs memory.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_ROUGH_FIELDS = ("RssAnon", "RssShmem", "VmSwap")
_EXACT_FIELDS = ("Pss_Anon", "Pss_Shmem", "SwapPss")


def used_bytes(pid: int, excluded_bytes: int, exact_above: int) -> int:
    """Return the memory of a process and its descendants.

    `excluded_bytes`: shared memory that is counted elsewhere. `exact_above`: if the estimate exceeds this number, count
    the pages that forked processes share only once; this is slow, so a smaller estimate may be too high.
    """
    family = [pid, *list_descendants(pid)]
    total = _total_bytes([_read_rough_use(each) for each in family], excluded_bytes)
    if total <= exact_above or len(family) == 1:
        return total
    # A process that has ended uses nothing. If the exact use may not be read, the rough figure counts.
    exact = [_read_fields(f"/proc/{each}/smaps_rollup", _EXACT_FIELDS) or _read_rough_use(each) for each in family]
    return min(total, _total_bytes(exact, excluded_bytes))


class DescendantUse(NamedTuple):
    pids: list[int]
    memory_bytes: int  # without memory that they share with each other or with the parent
    cpu_s: float


def measure_descendants(pid: int) -> DescendantUse:
    """Return the memory and CPU time of all processes that a process started, directly or indirectly."""
    pids = list(list_descendants(pid))
    memory = [_read_fields(f"/proc/{each}/status", ("RssAnon",)).get("RssAnon", 0) for each in pids]
    return DescendantUse(pids, sum(memory), sum(map(_read_cpu_s, pids)))


def _read_cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # the process has ended
        return 0.0
    return sum(map(int, fields[11:13])) / _TICKS  # in user mode and in the kernel


def list_descendants(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(word) for word in file.read().split()]
            for child in children:
                yield child
                yield from list_descendants(child)
    except OSError:  # the process has ended, or the kernel does not list children
        pass


def _read_rough_use(pid: int) -> dict[str, int]:
    return _read_fields(f"/proc/{pid}/status", _ROUGH_FIELDS)


def _total_bytes(measured: list[dict[str, int]], excluded_bytes: int) -> int:
    private = shared = 0
    for found in measured:
        shared += sum(size for name, size in found.items() if name.endswith("Shmem"))
        private += sum(size for name, size in found.items() if not name.endswith("Shmem"))
    return private + max(0, shared - excluded_bytes)


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
