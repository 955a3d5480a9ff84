"""A heap of deadlines, the earliest first. Pure: no I/O."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")
SWEEP_MARGIN = (
    1000  # stale entries are removed when the heap has grown to twice its size after the last sweep plus SWEEP
)


class Deadlines(Generic[T]):
    """A heap of keys, ordered by the time at which each key is due.

    An entry whose key is no longer due is stale. It stays in the heap until its time comes or the heap is swept.
    """

    def __init__(self, is_current: Callable[[T, float], bool]) -> None:
        """Create an empty heap.

        `is_current` returns whether a key is still due at a time. If `is_current` once returns False for a pair of
        key and time, it must always return False for this pair.
        """
        self._is_current = is_current
        self._heap: list[tuple[float, int, T]] = []
        self._number = 0  # keeps keys with equal times in order
        self._sweep_at = SWEEP_MARGIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, due_at: float, key: T) -> None:
        self._number += 1
        heappush(self._heap, (due_at, self._number, key))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_current(entry[2], entry[0])]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + SWEEP_MARGIN

    def peek_time(self) -> float | None:
        """Return the earliest time in the heap, or None if the heap is empty. The time may belong to a stale entry."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> T | None:
        """Remove and return the next key that is due, or None if no key is due."""
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heappop(self._heap)
            if self._is_current(key, when):
                return key
        return None
