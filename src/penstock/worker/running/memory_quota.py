"""Decides when a request may be prepared: when enough of the worker's memory and the block's share is free. Pure.

The size of a prepared request is known in advance. Requests wait in order while the worker's memory or their
block's share is used up; when memory becomes free, blocks take turns.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class MemoryQuota(Generic[T]):
    """Tracks a worker's free memory for prepared requests, the memory of each block, and the items that wait for it."""

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self.share_bytes = size_bytes // 2  # the most that one block may hold
        self._held_bytes: dict[str, int] = {}  # by block
        self._queues: dict[str, deque[tuple[T, int]]] = {}  # by block; the block whose turn it is comes first

    def enter(self, block_id: str, size_bytes: int, item: T) -> bool:
        """Reserve memory for an item and return True, or queue the item until `leave` frees memory and return False.

        `size_bytes` must not be larger than the share of a block.
        """
        assert size_bytes <= self.share_bytes
        if block_id not in self._queues and self._fits(block_id, size_bytes):
            self._take_memory(block_id, size_bytes)
            return True
        self._queues.setdefault(block_id, deque()).append((item, size_bytes))
        return False

    def withdraw(self, block_id: str, item: T) -> None:
        line = [entry for entry in self._queues.pop(block_id, ()) if entry[0] is not item]
        if line:
            self._queues[block_id] = deque(line)

    def leave(self, block_id: str, size_bytes: int) -> list[T]:
        """Free an item's memory; return the queued items that get it."""
        self._take_memory(block_id, -size_bytes)
        entering: list[T] = []
        while (turn := self._find_next_block()) is not None:
            line = self._queues.pop(turn)
            item, size = line.popleft()
            if line:
                self._queues[turn] = line  # behind the other blocks
            self._take_memory(turn, size)
            entering.append(item)
        return entering

    def _find_next_block(self) -> str | None:
        """Return the first block whose oldest item fits into the free memory."""
        return next((block_id for block_id, line in self._queues.items() if self._fits(block_id, line[0][1])), None)

    def _fits(self, block_id: str, size_bytes: int) -> bool:
        return size_bytes <= self._free_bytes and self._held_bytes.get(block_id, 0) + size_bytes <= self.share_bytes

    def _take_memory(self, block_id: str, size_bytes: int) -> None:
        self._free_bytes -= size_bytes
        self._held_bytes[block_id] = self._held_bytes.get(block_id, 0) + size_bytes
        if not self._held_bytes[block_id]:
            del self._held_bytes[block_id]
