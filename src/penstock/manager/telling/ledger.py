"""A keyed set that is told by its changes: all of it once, and then what is another since. Decides; never acts.

Each change has a revision of its own. Whoever has seen one of them gets what changed after it; whoever has seen none,
or one from so long ago that what was removed since is no longer known, gets everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_GONE = 4096  # removed keys that are remembered


@dataclass(frozen=True, slots=True)
class LedgerDelta(Generic[T]):
    revision: int  # of the ledger with this
    since: int  # what it follows; of a snapshot 0
    is_snapshot: bool  # `changed` is everything
    changed: Mapping[str, T]
    removed: tuple[str, ...] = ()


class Ledger(Generic[T]):
    def __init__(self, max_gone: int = MAX_GONE, after: int = 0) -> None:
        """`after`: the last revision of an earlier one; who has seen that, or less, gets everything."""
        self.revision = after + 1 if after else 0
        self._max_gone = max_gone
        self._items: dict[str, T] = {}
        self._changes: dict[str, int] = {}  # key to the revision of its last change, oldest first; also what is gone
        self._gone = 0
        self._floor = self.revision  # who has seen less cannot be told what went

    def get(self, key: str) -> T | None:
        return self._items.get(key)

    def items(self) -> Mapping[str, T]:
        return self._items

    def put(self, key: str, value: T) -> bool:
        """Returns whether it is another than before."""
        if key in self._items and self._items[key] == value:
            return False
        if key not in self._items and key in self._changes:
            self._gone -= 1
        self._items[key] = value
        self._change(key)
        return True

    def remove(self, key: str) -> bool:
        if key not in self._items:
            return False
        del self._items[key]
        self._gone += 1
        self._change(key)
        if self._gone > self._max_gone:
            self._forget()
        return True

    def replace(self, items: Mapping[str, T], prefix: str = "") -> bool:
        """These are there, and no others of keys that begin so."""
        others = [key for key in self._items if key.startswith(prefix) and key not in items]
        gone = [self.remove(key) for key in others]
        return any([*gone, *[self.put(key, value) for key, value in items.items()]])

    def since(self, seen: int) -> LedgerDelta[T]:
        """What is another since that revision; 0: none was seen."""
        if seen <= 0 or seen < self._floor or seen > self.revision:
            return LedgerDelta(self.revision, 0, True, dict(self._items))
        changed: dict[str, T] = {}
        removed: list[str] = []
        for key in reversed(self._changes):
            if self._changes[key] <= seen:
                break
            if key in self._items:
                changed[key] = self._items[key]
            else:
                removed.append(key)
        return LedgerDelta(self.revision, seen, False, dict(reversed(changed.items())), tuple(reversed(removed)))

    def _change(self, key: str) -> None:
        self.revision += 1
        self._changes.pop(key, None)
        self._changes[key] = self.revision

    def _forget(self) -> None:
        """The older half of what is gone is forgotten at once, so that the walk is paid for rarely."""
        excess = self._gone - self._max_gone // 2
        for key in [key for key in self._changes if key not in self._items][:excess]:
            self._floor = max(self._floor, self._changes.pop(key))
            self._gone -= 1
