"""How much memory and time a process takes with those that it made: a model's, whose limit some forms escape; a worker.

Pages of files are not counted: the system takes them back when it needs them.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_CHEAP = ("RssAnon", "RssShmem", "VmSwap")
_EXACT = ("Pss_Anon", "Pss_Shmem", "SwapPss")


def used_bytes(pid: int, not_its_own: int, worth_a_look: int) -> int:
    """`not_its_own`: of shared memory, what others account for. `worth_a_look`: below it a rough figure will do.

    Processes share what was there when one was forked; to count that once takes longer, so it is done where it matters.
    """
    family = [pid, *descendants(pid)]
    total = _total([_rough(each) for each in family], not_its_own)
    if total <= worth_a_look or len(family) == 1:
        return total
    # What has ended meanwhile has nothing any more; what may not be looked at counts as before.
    exact = [_fields(f"/proc/{each}/smaps_rollup", _EXACT) or _rough(each) for each in family]
    return min(total, _total(exact, not_its_own))


class ChildrenUse(NamedTuple):
    pids: list[int]
    memory_bytes: int  # their own: what they share with each other or with whom made them is not in it
    cpu_s: float


def children_use(pid: int) -> ChildrenUse:
    """Of all that the process started, and that these started."""
    pids = list(descendants(pid))
    memory = [_fields(f"/proc/{each}/status", ("RssAnon",)).get("RssAnon", 0) for each in pids]
    return ChildrenUse(pids, sum(memory), sum(map(_cpu_s, pids)))


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it has ended
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
    except OSError:  # it has ended, or the kernel does not tell
        pass


def _rough(pid: int) -> dict[str, int]:
    return _fields(f"/proc/{pid}/status", _CHEAP)


def _total(measured: list[dict[str, int]], not_its_own: int) -> int:
    private = shared = 0
    for found in measured:
        shared += sum(size for name, size in found.items() if name.endswith("Shmem"))
        private += sum(size for name, size in found.items() if not name.endswith("Shmem"))
    return private + max(0, shared - not_its_own)


def _fields(file: str, names: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        with open(file) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name in names:
                    found[name] = int(value.split()[0]) * 1024
    except OSError:  # it has ended
        pass
    return found
