"""Decides on which core a busy instance runs. Pure: no I/O.

Linux sometimes lets two computing threads share a core for milliseconds while another core is idle. So each busy
instance of a worker gets a core of its own while there are enough cores. Other processes may use these cores too: if
instances get too little time on their cores, Linux chooses the cores for a while.
"""

from collections.abc import Collection, Mapping

ENOUGH = 0.7  # least average share of its core that an instance must get; a server's own loops take up to a fifth
NEWEST = 1 / 16  # weight of a new batch in that average
SUSPENDED_FOR = 1000  # number of times that an instance then runs on any core


class Cores:
    """Assigns a processor to each busy instance of a worker, if possible on a core of its own."""

    def __init__(self, siblings: Mapping[int, Collection[int]]) -> None:
        """`siblings`: the usable processors, each with the processors that share its core (and possibly itself)."""
        self._siblings = siblings
        self._free_processors = sorted(siblings, reverse=True)  # the processor that was used last is at the end
        self._busy_processors: set[int] = set()
        self._average_share = 1.0
        self._suspended_for = 0

    @property
    def is_suspended(self) -> bool:
        """True while Linux chooses the cores of all instances."""
        return self._suspended_for > 0

    def acquire(self) -> int | None:
        """Assign a processor to an instance that becomes busy; return None if the instance may run on any processor."""
        if self._suspended_for:
            self._suspended_for -= 1
            return None
        if len(self._siblings) < 2 or not self._free_processors:
            return None
        whole = (
            number
            for number in reversed(self._free_processors)
            if self._busy_processors.isdisjoint(self._siblings[number])
        )
        number = next(whole, self._free_processors[-1])
        self._free_processors.remove(number)
        self._busy_processors.add(number)
        return number

    def release(self, number: int) -> None:
        self._busy_processors.remove(number)
        self._free_processors.append(number)

    def record(self, took_ns: int, cpu_ns: int) -> None:
        """Record how long a batch took from waking its instance to its end, and how much CPU time it used."""
        self._average_share += (min(1.0, cpu_ns / max(1, took_ns)) - self._average_share) * NEWEST
        if self._average_share < ENOUGH:
            self._average_share, self._suspended_for = 1.0, SUSPENDED_FOR
