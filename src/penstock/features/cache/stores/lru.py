"""A table of entries bounded by bytes, with least-recently-used eviction and a time to live per entry. Pure: no I/O."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

ENTRY_BYTES = 448  # assumed memory of an entry in addition to its key and value: objects, table, heap
EXPIRED_AT_ONCE = 64  # entries removed per call, so that no request waits while many expire together
SPARE_EXPIRIES = 64  # stale items of the heap that are tolerated before it is rebuilt


@dataclass(slots=True)
class StoreCounts:
    """The size of a store and its counts since it started."""

    entries: int = 0
    size_bytes: int = 0
    evicted_by_size: int = 0
    evicted_by_ttl: int = 0
    errors: int = 0  # calls that failed, were late, or were not tried because the store is unavailable
    dropped: int = 0  # writes dropped because the buffer was full


@dataclass(slots=True)
class Entry:
    value: bytes | None  # None: the value is in the store's file, and was not read yet
    size_bytes: int
    expires_at: float


class Lru:
    """A table of entries in order of use. Methods that remove entries return the keys, for the store to delete, too."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.evicted_by_size = 0
        self.evicted_by_ttl = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._expiries: list[tuple[float, bytes]] = []  # a heap; items of replaced entries stay until their time

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def fits(self, key: bytes, value_bytes: int) -> bool:
        return estimate_entry_bytes(key, value_bytes) <= self.max_bytes

    def find(self, key: bytes, now: float) -> Entry | None:
        """Return the entry, or None if it does not exist or has expired; mark it as used."""
        entry = self._entries.get(key)
        if entry is None or entry.expires_at <= now:
            return None
        self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, value: bytes | None, value_bytes: int, expires_at: float, now: float) -> list[bytes]:
        """Add an entry; return the keys that were evicted for it or had expired."""
        assert self.fits(key, value_bytes), "call fits first"
        gone = self.expire(now)
        self.remove(key)
        self._entries[key] = Entry(value, estimate_entry_bytes(key, value_bytes), expires_at)
        self.size_bytes += estimate_entry_bytes(key, value_bytes)
        heappush(self._expiries, (expires_at, key))
        if len(self._expiries) > 2 * len(self._entries) + SPARE_EXPIRIES:
            self._expiries = [(entry.expires_at, key) for key, entry in self._entries.items()]
            heapify(self._expiries)
        while self.size_bytes > self.max_bytes:
            oldest = next(iter(self._entries))
            self.remove(oldest)
            self.evicted_by_size += 1
            gone.append(oldest)
        return gone

    def remove(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.size_bytes -= entry.size_bytes
        return True

    def expire(self, now: float) -> list[bytes]:
        """Remove some of the expired entries, and return their keys."""
        gone: list[bytes] = []
        while self._expiries and self._expiries[0][0] <= now and len(gone) < EXPIRED_AT_ONCE:
            expires_at, key = heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and entry.expires_at == expires_at:
                self.remove(key)
                self.evicted_by_ttl += 1
                gone.append(key)
        return gone

    def clear(self, prefix: bytes) -> list[bytes]:
        gone = [key for key in self._entries if key.startswith(prefix)]
        for key in gone:
            self.remove(key)
        return gone

    def get_counts(self) -> StoreCounts:
        return StoreCounts(len(self), self.size_bytes, self.evicted_by_size, self.evicted_by_ttl)


def estimate_entry_bytes(key: bytes, value_bytes: int) -> int:
    return len(key) + value_bytes + ENTRY_BYTES
