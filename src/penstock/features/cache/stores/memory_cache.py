"""Cached answers in this process's memory."""

import time
from collections.abc import Callable

from penstock.features.cache.stores.lru import Lru, StoreCounts


class MemoryStore:
    """A CacheStore in this process's memory."""

    name = "memory"

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lru = Lru(max_bytes)
        self._clock = clock

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        self._lru.clear(b"")

    def get_now(self, key: bytes) -> bytes | None:
        entry = self._lru.find(key, self._clock())
        return None if entry is None else entry.value

    async def get(self, key: bytes) -> bytes | None:
        return self.get_now(key)

    async def set(self, key: bytes, value: bytes, ttl_s: float) -> None:
        if not self._lru.fits(key, len(value)):
            self._lru.remove(key)
            return
        now = self._clock()
        self._lru.put(key, value, len(value), now + ttl_s, now)

    async def delete(self, key: bytes) -> bool:
        return self._lru.remove(key)

    async def exists(self, key: bytes) -> bool:
        return self._lru.find(key, self._clock()) is not None

    async def clear(self, prefix: bytes = b"") -> int:
        return len(self._lru.clear(prefix))

    def get_counts(self) -> StoreCounts:
        self._lru.expire(self._clock())
        return self._lru.get_counts()
