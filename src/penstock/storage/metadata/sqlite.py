"""The metadata store in SQLite, for one manager: all of it is in memory, and what changes is written at once."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from penstock.core.errors import StoreUnavailable, Unavailable
from penstock.storage.metadata.base import CALL_S, Change, Compare, MetadataStore, Record, Snapshot, Write
from penstock.storage.metadata.records import Records
from penstock.storage.metadata.sqlite_file import MetadataFile, Row, open_file

log = structlog.get_logger()
T = TypeVar("T")
ADVICE = (
    "block ids and routing changes are not kept over a restart: free some space, "
    "or give --data-dir a folder that can be written"
)


class SqliteMetadataStore(MetadataStore):
    """Leases, and what is written under them, end with the process.

    Where the disk is full or read-only the server goes on: what may wait is true for this life of it and written with
    the next chance, and any other change is refused.
    """

    def __init__(self, file: MetadataFile, records: Records, timeout_s: float, clock: Callable[[], float]) -> None:
        self._file = file
        self._records = records
        self._timeout_s = timeout_s
        self._clock = clock
        self._unwritten: set[str] = set()
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @classmethod
    async def open(
        cls, file: Path, timeout_s: float = CALL_S, clock: Callable[[], float] = time.monotonic
    ) -> "SqliteMetadataStore":
        opened, records, revision, error = await asyncio.to_thread(open_file, file)
        if error is not None:
            log.warning("metadata_unwritable", file=str(file), error=str(error), advice=ADVICE)
            # Nothing can be counted on the disk: the clock keeps revisions from going back over the next restart.
            revision = max(revision, time.time_ns() // 1000)
        return cls(opened, Records(records, revision), timeout_s, clock)

    async def get(self, key: str) -> Record | None:
        await self._end_leases()
        return self._records.get(key)

    async def list(self, prefix: str) -> Snapshot:
        await self._end_leases()
        return self._records.snapshot(prefix)

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        await self._end_leases()
        return await self._whole(self._commit(writes, compares))

    async def watch(self, prefix: str, after: int) -> AsyncIterator[Sequence[Change]]:
        while not self._is_closed:
            changed = self._changed
            for changes in self._records.since(after):
                after = changes[0].revision
                if found := [change for change in changes if change.key.startswith(prefix)]:
                    yield found
            await changed.wait()
        raise StoreUnavailable("the metadata store is closed")

    async def grant(self, ttl_s: float) -> int:
        lease = self._records.grant(ttl_s, self._clock())
        self._set_timer()
        return lease

    async def keep_alive(self, lease: int) -> float:
        await self._end_leases()
        return self._records.keep_alive(lease, self._clock())

    async def revoke(self, lease: int) -> None:
        await self._whole(self._end(lease))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timeout_s)
        await asyncio.to_thread(self._file.close)

    # --- writing

    async def _whole(self, change: Coroutine[None, None, T]) -> T:
        """Done in a task of its own: a caller that leaves halfway must not part the file from what is in memory."""
        if self._is_closed:
            change.close()
            raise StoreUnavailable("the metadata store is closed")
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise StoreUnavailable(f"the metadata store's disk did not answer within {self._timeout_s} s") from error

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has heard it, or has left

    async def _commit(self, writes: Sequence[Write], compares: Sequence[Compare]) -> int:
        async with self._writing:
            await self._change(writes, compares)
            return self._records.revision

    async def _change(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> None:
        changes = self._records.plan(writes, compares)
        if changes:
            await self._keep(changes, writes)
            self._records.apply(changes, writes)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _keep(self, changes: Sequence[Change], writes: Sequence[Write]) -> None:
        rows = self._rows(changes, writes)
        try:
            await asyncio.to_thread(self._file.write, rows, changes[0].revision)
            self._unwritten.clear()
        except (OSError, sqlite3.Error) as error:
            if not all(write.may_wait or write.lease for write in writes):
                log.error("metadata_not_written", file=str(self._file.path), error=str(error))
                # Without the path: it goes to clients.
                raise Unavailable(f"the server's data directory cannot be written: {_reason(error)}") from error
            self._unwritten |= {row[0] for row in rows}
            for change in changes:
                event = "block_id_not_kept" if change.key.startswith("blocks/") else "metadata_not_kept"
                log.warning(event, key=change.key, error=_reason(error), advice=ADVICE)

    def _rows(self, changes: Sequence[Change], writes: Sequence[Write]) -> Sequence[Row]:
        """What the file must be told, with what it could not be told before; leased records are not in it."""
        leased = {write.key for write in writes if write.lease}
        rows: dict[str, Row] = {}
        for key in self._unwritten:
            record = self._records.get(key)
            kept = record if record is not None and not self._records.is_leased(key) else None
            rows[key] = (key, kept.value, kept.revision) if kept is not None else (key, None, 0)
        for change in changes:
            rows[change.key] = (change.key, None if change.key in leased else change.value, change.revision)
        return tuple(rows.values())

    # --- leases

    async def _end_leases(self) -> None:
        for lease in self._records.ended(self._clock()):
            await self._whole(self._end(lease))

    async def _end(self, lease: int) -> None:
        async with self._writing:
            await self._change(self._records.ending(lease))
            self._records.forget(lease)

    def _set_timer(self) -> None:
        """Who watches hears of a lease's end without anybody calling."""
        ends_at = self._records.next_end()
        if self._timer is not None:
            self._timer.cancel()
        if ends_at is not None and not self._is_closed:
            delay_s = max(0.001, ends_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._time_is_up)

    def _time_is_up(self) -> None:
        task = asyncio.create_task(self._end_leases())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        task.add_done_callback(lambda _: self._set_timer())


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
