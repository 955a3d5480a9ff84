"""Cached answers that outlive the gateway: its memory in front, a SQLite file behind, written later."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiosqlite
import structlog

from penstock.core.errors import ConfigError, Unavailable
from penstock.storage.cache.lru import StoreCounts
from penstock.storage.cache.memory import MemoryStore
from penstock.storage.cache.sqlite_file import open_file
from penstock.storage.disk import is_unwritable
from penstock.storage.outage import RETRY_S, Outage

log = structlog.get_logger()
WRITE_EVERY_S = 0.1  # what comes within it is written together
BATCH_BYTES = 1024 * 1024  # of one transaction: a read waits for it
BATCH_ROWS = 256
MIN_BUFFER_BYTES = 1024 * 1024
CLOSE_S = 5.0
FAULTS = (OSError, aiosqlite.Error, ConfigError)  # of a file that was open, or is opened anew


@dataclass(slots=True, eq=False)
class _Write:
    value: bytes
    expires_at: float


_Change = _Write | None  # None: the row goes


class SqliteStore(MemoryStore):
    """One LRU decides for memory and file alike, so that both are bounded by `max_bytes`.

    After a restart it knows what the file has, and reads a value when it is asked for. What it cannot write
    in time is dropped from the file and not from memory; `_on_disk` are the rows that the file may have.
    """

    name = "sqlite"

    def __init__(self, file: Path, max_bytes: int, timeout_s: float, clock: Callable[[], float] = time.time) -> None:
        super().__init__(max_bytes, clock)  # of the wall: times to live go on while nobody runs
        self._file = file
        self._timeout_s = timeout_s
        self._buffer_bytes = max(MIN_BUFFER_BYTES, max_bytes // 16)
        self._pending: dict[bytes, _Change] = {}
        self._pending_bytes = 0
        self._on_disk: set[bytes] = set()
        self._has_work = asyncio.Event()
        self._turn = asyncio.Lock()  # of writers: the one in the background, and who clears
        self._outage = Outage()
        self._errors = 0
        self._dropped = 0
        self._connection: aiosqlite.Connection | None = None
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Where the disk is full or read-only, answers are kept in memory, and the file is tried again later."""
        try:
            self._connection = await open_file(self._file)
            await self._take_over(self._connection)
        except (OSError, aiosqlite.Error) as error:
            if not is_unwritable(error):
                await self._close_file()
                raise ConfigError(f"{self._file}: the response cache cannot be used: {error}; delete it") from error
            self._failed("open", error)
        self._writer = asyncio.create_task(self._write_forever(), name="cache-writer")

    async def _take_over(self, connection: aiosqlite.Connection) -> None:
        # In the order of writing, which becomes the order of use.
        query = "SELECT key, size, expires_at FROM entries ORDER BY rowid"
        now = self._clock()
        for key, size, expires_at in await connection.execute_fetchall(query):
            self._on_disk.add(key)
            if self._lru.fits(key, size):
                self._forget(self._lru.put(key, None, size, expires_at, now))
            else:
                self._forget([key])
        while gone := self._lru.expire(now):
            self._forget(gone)
        await self._flush()
        # As a script: a statement would free one page and stop.
        await connection.executescript("PRAGMA incremental_vacuum")

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            self._writer = None
        if self._connection is None:
            return
        try:
            await asyncio.wait_for(self._flush(), CLOSE_S)
        except (TimeoutError, aiosqlite.Error) as error:
            self._failed("write", error)
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
            self._failed("read", error)
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
            self._forget([key])
            return
        now = self._clock()
        self._forget(self._lru.put(key, value, len(value), now + ttl_s, now))
        self._enqueue(key, _Write(value, now + ttl_s))

    async def delete(self, key: bytes) -> bool:
        was_there = self._lru.remove(key)
        self._forget([key])
        await self._flush_or_raise()
        return was_there

    async def clear(self, prefix: bytes = b"") -> int:
        gone = self._lru.clear(prefix)
        self._forget(gone)
        await self._flush_or_raise()
        return len(gone)

    def counts(self) -> StoreCounts:
        self._forget(self._lru.expire(self._clock()))
        return replace(self._lru.counts(), errors=self._errors, dropped=self._dropped)

    # --- the buffer

    def _enqueue(self, key: bytes, write: _Write) -> None:
        self._withdraw(key)
        if self._pending_bytes + len(write.value) > self._buffer_bytes:
            self._dropped += 1
            self._forget([key])  # an older value in the file must not come back
            return
        self._pending[key] = write
        self._pending_bytes += len(write.value)
        self._has_work.set()

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._withdraw(key)
            if key in self._on_disk:
                self._pending[key] = None
                self._has_work.set()

    def _withdraw(self, key: bytes) -> None:
        change = self._pending.pop(key, None)
        if change is not None:
            self._pending_bytes -= len(change.value)

    # --- the file

    async def _write_forever(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(WRITE_EVERY_S)
            self._has_work.clear()
            try:
                await self._flush()
            except FAULTS as error:
                self._failed("write", error)
                self._has_work.set()
                await asyncio.sleep(RETRY_S)

    async def _flush_or_raise(self) -> None:
        try:
            await self._flush()
        except FAULTS as error:
            self._failed("write", error)
            raise Unavailable(f"the response cache's file cannot be written: {error}") from error

    async def _flush(self) -> None:
        """Writes what is pending now. What fails stays pending."""
        async with self._turn:
            if self._connection is None:
                self._connection = await self._begin_anew()
            for batch in self._batches(list(self._pending)):
                await self._commit(batch)
                for key, change in batch:
                    if self._pending.get(key) is change:
                        self._withdraw(key)
                    if change is None:
                        self._on_disk.discard(key)
        if self._outage.worked():
            log.info("cache_file_back", file=str(self._file))

    async def _begin_anew(self) -> aiosqlite.Connection:
        """A file that could not be opened at the start: what it has may be older than what is in memory."""
        connection = await open_file(self._file)
        try:
            await connection.execute("DELETE FROM entries")
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        return connection

    def _batches(self, keys: list[bytes]) -> Iterator[list[tuple[bytes, _Change]]]:
        batch: list[tuple[bytes, _Change]] = []
        size = 0
        for key in keys:
            if key not in self._pending:
                continue  # withdrawn meanwhile
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

    def _failed(self, what: str, error: Exception) -> None:
        self._errors += 1
        if self._outage.failed(self._clock()):
            log.warning("cache_file_failed", file=str(self._file), what=what, error=str(error) or type(error).__name__)
