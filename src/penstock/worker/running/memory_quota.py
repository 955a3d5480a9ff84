"""Decides when a request may be prepared: if the worker's memory and the block's share have room. Pure: no I/O.

The size of a prepared request is known in advance. Requests wait in order while the worker's memory or their
block's share is used up; when memory becomes free, blocks take turns.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class MemoryQuota(Generic[T]):
    """Tracks a worker's free memory, the memory that each block holds, and the items that wait for memory."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes
        self.share_bytes = size_bytes // 2  # the most that one block may hold
        self._held: dict[str, int] = {}  # by block
        self._lines: dict[str, deque[tuple[T, int]]] = {}  # by block; the block whose turn it is comes first

    def enter(self, block_id: str, size_bytes: int, item: T) -> bool:
        """Take memory for an item and return True, or queue the item until `leave` frees memory and return False.

        `size_bytes` must not be larger than a share.
        """
        assert size_bytes <= self.share_bytes
        if block_id not in self._lines and self._fits(block_id, size_bytes):
            self._take_memory(block_id, size_bytes)
            return True
        self._lines.setdefault(block_id, deque()).append((item, size_bytes))
        return False

    def withdraw(self, block_id: str, item: T) -> None:
        line = [entry for entry in self._lines.pop(block_id, ()) if entry[0] is not item]
        if line:
            self._lines[block_id] = deque(line)

    def leave(self, block_id: str, size_bytes: int) -> list[T]:
        """Give memory back; return the queued items that now have memory."""
        self._take_memory(block_id, -size_bytes)
        entering: list[T] = []
        while (turn := self._next_block()) is not None:
            line = self._lines.pop(turn)
            item, size = line.popleft()
            if line:
                self._lines[turn] = line  # behind the other blocks
            self._take_memory(turn, size)
            entering.append(item)
        return entering

    def _next_block(self) -> str | None:
        """Return the first block whose oldest item fits into the free memory."""
        return next((block_id for block_id, line in self._lines.items() if self._fits(block_id, line[0][1])), None)

    def _fits(self, block_id: str, size_bytes: int) -> bool:
        return size_bytes <= self._free and self._held.get(block_id, 0) + size_bytes <= self.share_bytes

    def _take_memory(self, block_id: str, size_bytes: int) -> None:
        self._free -= size_bytes
        self._held[block_id] = self._held.get(block_id, 0) + size_bytes
        if not self._held[block_id]:
            del self._held[block_id]
