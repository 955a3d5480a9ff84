"""A map that is published as a snapshot followed by deltas. Pure: no I/O.

Each change has a revision. A reader that has seen a revision gets the changes after it. A reader gets a snapshot if it
has seen no revision, or if the map no longer remembers all keys that were removed after the revision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_REMOVED = 4096  # removed keys that are remembered


@dataclass(frozen=True, slots=True)
class MapDelta(Generic[T]):
    revision: int  # of the map after this delta
    since_revision: int  # the revision that the delta follows; 0 for a snapshot
    is_snapshot: bool  # `changed` contains all items
    changed: Mapping[str, T]
    removed: tuple[str, ...] = ()


class VersionedMap(Generic[T]):
    def __init__(self, max_removed: int = MAX_REMOVED, last_revision: int = 0) -> None:
        """`after`: the last revision of an earlier map; a reader that has seen only the earlier map gets a snapshot."""
        self.revision = last_revision + 1 if last_revision else 0
        self._max_removed = max_removed
        self._items: dict[str, T] = {}
        self._changes: dict[str, int] = {}  # key to the revision of its last change, oldest first; removed keys too
        self._removed = 0
        self._floor = self.revision  # removals before this revision are forgotten

    def get(self, key: str) -> T | None:
        return self._items.get(key)

    def get_items(self) -> Mapping[str, T]:
        return self._items

    def put(self, key: str, value: T) -> bool:
        """Set the value of a key; return whether the value changed."""
        if key in self._items and self._items[key] == value:
            return False
        if key not in self._items and key in self._changes:
            self._removed -= 1
        self._items[key] = value
        self._change(key)
        return True

    def remove(self, key: str) -> bool:
        if key not in self._items:
            return False
        del self._items[key]
        self._removed += 1
        self._change(key)
        if self._removed > self._max_removed:
            self._forget_removed()
        return True

    def replace(self, items: Mapping[str, T], prefix: str = "") -> bool:
        """Replace all items whose keys start with `prefix` by `items`; return whether anything changed."""
        others = [key for key in self._items if key.startswith(prefix) and key not in items]
        removed = [self.remove(key) for key in others]
        return any([*removed, *[self.put(key, value) for key, value in items.items()]])

    def read_since(self, revision: int) -> MapDelta[T]:
        """Return the changes after a revision, or a snapshot if `revision` is 0 or too old."""
        if revision <= 0 or revision < self._floor or revision > self.revision:
            return MapDelta(self.revision, 0, True, dict(self._items))
        changed: dict[str, T] = {}
        removed: list[str] = []
        for key in reversed(self._changes):
            if self._changes[key] <= revision:
                break
            if key in self._items:
                changed[key] = self._items[key]
            else:
                removed.append(key)
        return MapDelta(self.revision, revision, False, dict(reversed(changed.items())), tuple(reversed(removed)))

    def _change(self, key: str) -> None:
        self.revision += 1
        self._changes.pop(key, None)
        self._changes[key] = self.revision

    def _forget_removed(self) -> None:
        """Forget the older half of the removed keys. Forgetting many keys at once keeps this scan rare."""
        excess = self._removed - self._max_removed // 2
        for key in [key for key in self._changes if key not in self._items][:excess]:
            self._floor = max(self._floor, self._changes.pop(key))
            self._removed -= 1
