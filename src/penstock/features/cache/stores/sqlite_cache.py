"""Cached answers that survive a restart: in memory, and written to a SQLite file in the background."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiosqlite
import structlog

from penstock.core.errors import ConfigError, Unavailable
from penstock.features.cache.stores.lru import StoreCounts
from penstock.features.cache.stores.memory_cache import MemoryStore
from penstock.features.cache.stores.sqlite_cache_file import open_file
from penstock.storage.disk import is_unwritable
from penstock.storage.outage import RETRY_S, Outage
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
WRITE_EVERY_S = 0.1  # changes within this time are written together
BATCH_BYTES = 1024 * 1024  # size of one transaction, because a read may have to wait for it
BATCH_ROWS = 256
MIN_BUFFER_BYTES = 1024 * 1024
CLOSE_S = 5.0
FAULTS = (OSError, aiosqlite.Error, ConfigError)  # errors of writing to the file or of opening it again


@dataclass(slots=True, eq=False)
class _Write:
    value: bytes
    expires_at: float


_Change = _Write | None  # None: delete the row


class SqliteStore(MemoryStore):
    """A CacheStore in memory and a file. Both have the entries of one LRU table, so that `max_bytes` limits both.

    After a restart, the table is read from the file, and each value is read when it is first requested. An entry that
    cannot be written in time stays in memory only. `_on_disk` holds the keys of the rows that the file may have.
    """

    name = "sqlite"

    def __init__(self, file: Path, max_bytes: int, timeout_s: float, clock: Callable[[], float] = time.time) -> None:
        super().__init__(max_bytes, clock)  # wall-clock time, so that entries also expire while the server is down
        self._file = file
        self._timeout_s = timeout_s
        self._buffer_bytes = max(MIN_BUFFER_BYTES, max_bytes // 16)
        self._pending: dict[bytes, _Change] = {}
        self._pending_bytes = 0
        self._on_disk: set[bytes] = set()
        self._has_work = asyncio.Event()
        self._write_lock = asyncio.Lock()  # held by the background writer, or by a caller that deletes
        self._outage = Outage()
        self._errors = 0
        self._dropped = 0
        self._connection: aiosqlite.Connection | None = None
        self._tasks = BackgroundTasks("cache")

    async def start(self) -> None:
        """Open the file. If the disk is full or read-only, use only memory, and try the file again later."""
        try:
            self._connection = await open_file(self._file)
            await self._read_index(self._connection)
        except (OSError, aiosqlite.Error) as error:
            if not is_unwritable(error):
                await self._close_file()
                raise ConfigError(f"{self._file}: the response cache cannot be used: {error}; delete it") from error
            self._count_file_failure("open", error)
        self._tasks.supervise("cache-writer", self._write_changes, deadline_s=None)

    async def _read_index(self, connection: aiosqlite.Connection) -> None:
        # The order of writing becomes the order of use.
        query = "SELECT key, size, expires_at FROM entries ORDER BY rowid"
        now = self._clock()
        for key, size, expires_at in await connection.execute_fetchall(query):
            self._on_disk.add(key)
            if self._lru.fits(key, size):
                self._delete_rows(self._lru.put(key, None, size, expires_at, now))
            else:
                self._delete_rows([key])
        while gone := self._lru.expire(now):
            self._delete_rows(gone)
        await self._flush()
        # As a script, because a single execute would free only one page.
        await connection.executescript("PRAGMA incremental_vacuum")

    async def close(self) -> None:
        await self._tasks.close()
        if self._connection is None:
            return
        try:
            await asyncio.wait_for(self._flush(), CLOSE_S)
        except (TimeoutError, aiosqlite.Error) as error:
            self._count_file_failure("write", error)
        await self._close_file()

    async def _close_file(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.wait_for(connection.close(), CLOSE_S)

    async def get(self, key: bytes) -> bytes | None:
        entry = self._lru.find(key, self._clock())
        if entry is None or entry.value is not None:
            return None if entry is None else entry.value
        assert self._connection is not None, "start the store first"
        query = "SELECT value FROM entries WHERE key = ?"
        try:
            async with asyncio.timeout(self._timeout_s):
                rows = await self._connection.execute_fetchall(query, (key,))
        except (TimeoutError, aiosqlite.Error) as error:
            self._count_file_failure("read", error)
            return None
        value = next((bytes(found) for (found,) in rows), None)
        if value is None:
            self._lru.remove(key)
        elif entry.value is None:
            entry.value = value
        return value

    async def set(self, key: bytes, value: bytes, ttl_s: float) -> None:
        if not self._lru.fits(key, len(value)):
            self._lru.remove(key)
            self._delete_rows([key])
            return
        now = self._clock()
        self._delete_rows(self._lru.put(key, value, len(value), now + ttl_s, now))
        self._enqueue(key, _Write(value, now + ttl_s))

    async def delete(self, key: bytes) -> bool:
        was_there = self._lru.remove(key)
        self._delete_rows([key])
        await self._flush_or_raise()
        return was_there

    async def clear(self, prefix: bytes = b"") -> int:
        gone = self._lru.clear(prefix)
        self._delete_rows(gone)
        await self._flush_or_raise()
        return len(gone)

    def get_counts(self) -> StoreCounts:
        self._delete_rows(self._lru.expire(self._clock()))
        return replace(self._lru.get_counts(), errors=self._errors, dropped=self._dropped)

    # --- the buffer

    def _enqueue(self, key: bytes, write: _Write) -> None:
        self._drop_pending(key)
        if self._pending_bytes + len(write.value) > self._buffer_bytes:
            self._dropped += 1
            self._delete_rows([key])  # an older value in the file must not be found after a restart
            return
        self._pending[key] = write
        self._pending_bytes += len(write.value)
        self._has_work.set()

    def _delete_rows(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._drop_pending(key)
            if key in self._on_disk:
                self._pending[key] = None
                self._has_work.set()

    def _drop_pending(self, key: bytes) -> None:
        change = self._pending.pop(key, None)
        if change is not None:
            self._pending_bytes -= len(change.value)

    # --- the file

    async def _write_changes(self) -> None:
        """Wait for changes and write them."""
        await self._has_work.wait()
        await asyncio.sleep(WRITE_EVERY_S)
        self._has_work.clear()
        try:
            await self._flush()
        except FAULTS as error:
            self._count_file_failure("write", error)
            self._has_work.set()
            await asyncio.sleep(RETRY_S)
        except Exception:
            self._has_work.set()
            raise

    async def _flush_or_raise(self) -> None:
        try:
            await self._flush()
        except FAULTS as error:
            self._count_file_failure("write", error)
            raise Unavailable(f"the response cache's file cannot be written: {error}") from error

    async def _flush(self) -> None:
        """Write all pending changes; changes that fail stay pending."""
        async with self._write_lock:
            if self._connection is None:
                self._connection = await self._reopen()
            for batch in self._split_batches(list(self._pending)):
                await self._commit(batch)
                for key, change in batch:
                    if self._pending.get(key) is change:
                        self._drop_pending(key)
                    if change is None:
                        self._on_disk.discard(key)
        if self._outage.record_success():
            log.info("cache_file_recovered", file=str(self._file))

    async def _reopen(self) -> aiosqlite.Connection:
        """Open the file after it could not be opened at the start; empty it, because its entries may be outdated."""
        connection = await open_file(self._file)
        try:
            await connection.execute("DELETE FROM entries")
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        return connection

    def _split_batches(self, keys: list[bytes]) -> Iterator[list[tuple[bytes, _Change]]]:
        batch: list[tuple[bytes, _Change]] = []
        size = 0
        for key in keys:
            if key not in self._pending:
                continue  # dropped meanwhile
            change = self._pending[key]
            batch.append((key, change))
            size += len(change.value) if change else 0
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    async def _commit(self, batch: list[tuple[bytes, _Change]]) -> None:
        assert self._connection is not None, "start the store first"
        rows = [(key, change.expires_at, len(change.value), change.value) for key, change in batch if change]
        gone = [(key,) for key, change in batch if change is None]
        self._on_disk.update(row[0] for row in rows)
        try:
            await self._connection.executemany("DELETE FROM entries WHERE key = ?", gone)
            await self._connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)
            await self._connection.commit()
        except aiosqlite.Error:
            await self._connection.rollback()
            raise

    def _count_file_failure(self, what: str, error: Exception) -> None:
        self._errors += 1
        if self._outage.record_failure(self._clock()):
            log.warning("cache_file_failed", file=str(self._file), what=what, error=str(error) or type(error).__name__)
