"""Which core a busy instance keeps to. Decides; never acts.

Linux does not always keep threads that compute apart where others run for a moment now and then: it leaves two of
them on one core for milliseconds while the other has nothing to do. So each busy instance of a worker has a core of
its own, as long as there are enough. Others on the machine may compute there, too: where instances get too little of
their cores, all are left to the system for a while.
"""

from collections.abc import Collection, Mapping

ENOUGH = 0.7  # of a core, on average of the latest batches; a server's own loops take up to a fifth
NEWEST = 1 / 16  # of that average
LEFT_FOR = 1000  # times that an instance becomes busy


class Cores:
    def __init__(self, siblings: Mapping[int, Collection[int]]) -> None:
        """The processors that may be used, and for each those that share its core, itself included or not."""
        self._siblings = siblings
        self._free = sorted(siblings, reverse=True)  # who was used last is last
        self._busy: set[int] = set()
        self._had = 1.0
        self._left = 0

    @property
    def are_left(self) -> bool:
        """Whether instances are to run wherever there is room."""
        return self._left > 0

    def take(self) -> int | None:
        """None: wherever there is room."""
        if self._left:
            self._left -= 1
            return None
        if len(self._siblings) < 2 or not self._free:
            return None
        whole = (number for number in reversed(self._free) if self._busy.isdisjoint(self._siblings[number]))
        number = next(whole, self._free[-1])
        self._free.remove(number)
        self._busy.add(number)
        return number

    def give_back(self, number: int) -> None:
        self._busy.remove(number)
        self._free.append(number)

    def note(self, took_ns: int, cpu_ns: int) -> None:
        """Of a batch on a core that was taken for it: how long it took since its instance was woken, and what of that
        it had the core."""
        self._had += (min(1.0, cpu_ns / max(1, took_ns)) - self._had) * NEWEST
        if self._had < ENOUGH:
            self._had, self._left = 1.0, LEFT_FOR
