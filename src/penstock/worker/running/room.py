"""How much may be prepared at a time, in a worker and of one block. Decides; never acts.

What a request will take is known before it is prepared. Of a block that has its share, requests wait in their order;
when room is given back, blocks take turns.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Room(Generic[T]):
    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes
        self.share_bytes = size_bytes // 2  # the most that one block may have
        self._held: dict[str, int] = {}  # by block
        self._lines: dict[str, deque[tuple[T, int]]] = {}  # by block; the block whose turn it is comes first

    def enter(self, block_id: str, size_bytes: int, item: T) -> bool:
        """False: it waits, and is told of by a later `leave`. Nothing larger than a share can enter."""
        assert size_bytes <= self.share_bytes
        if block_id not in self._lines and self._fits(block_id, size_bytes):
            self._take(block_id, size_bytes)
            return True
        self._lines.setdefault(block_id, deque()).append((item, size_bytes))
        return False

    def withdraw(self, block_id: str, item: T) -> None:
        """It does not wait any more."""
        line = [entry for entry in self._lines.pop(block_id, ()) if entry[0] is not item]
        if line:
            self._lines[block_id] = deque(line)

    def leave(self, block_id: str, size_bytes: int) -> list[T]:
        """Gives back what was taken; returns who enters in its place."""
        self._take(block_id, -size_bytes)
        entering: list[T] = []
        while (turn := self._next()) is not None:
            line = self._lines.pop(turn)
            item, size = line.popleft()
            if line:
                self._lines[turn] = line  # behind the others
            self._take(turn, size)
            entering.append(item)
        return entering

    def _next(self) -> str | None:
        """The block whose first in line may enter now."""
        return next((block_id for block_id, line in self._lines.items() if self._fits(block_id, line[0][1])), None)

    def _fits(self, block_id: str, size_bytes: int) -> bool:
        return size_bytes <= self._free and self._held.get(block_id, 0) + size_bytes <= self.share_bytes

    def _take(self, block_id: str, size_bytes: int) -> None:
        self._free -= size_bytes
        self._held[block_id] = self._held.get(block_id, 0) + size_bytes
        if not self._held[block_id]:
            del self._held[block_id]
