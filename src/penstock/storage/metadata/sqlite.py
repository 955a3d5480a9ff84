"""The metadata store in SQLite, for one manager: all records are in memory, and changes are written immediately."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from penstock.core.error_text import explain_cause
from penstock.core.errors import StoreUnavailable, Unavailable
from penstock.storage.metadata.metadata_store import CALL_S, Change, Compare, MetadataStore, Record, Snapshot, Write
from penstock.storage.metadata.records import Records
from penstock.storage.metadata.sqlite_file import MetadataFile, Row, open_file
from penstock.telemetry.background import BackgroundTasks

log = structlog.get_logger()
T = TypeVar("T")
ADVICE = (
    "block ids and routing changes will be lost at a restart: free some space, "
    "or choose a writable folder with --data-dir"
)


class SqliteMetadataStore(MetadataStore):
    """A store whose leases, and the records written under them, end with the process.

    If the disk is full or read-only, writes with `may_wait` apply in memory and are stored when the disk is writable
    again; other writes are refused.
    """

    def __init__(self, file: MetadataFile, records: Records, timeout_s: float, clock: Callable[[], float]) -> None:
        self._file = file
        self._records = records
        self._timeout_s = timeout_s
        self._clock = clock
        self._unwritten: set[str] = set()
        self._has_advised = False  # since the disk was last writable
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks("metadata")
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @classmethod
    async def open(
        cls, file: Path, timeout_s: float = CALL_S, clock: Callable[[], float] = time.monotonic
    ) -> "SqliteMetadataStore":
        opened, records, revision, error = await asyncio.to_thread(open_file, file)
        if error is not None:
            # Without a stored revision, the clock ensures that revisions do not go back at the next restart.
            revision = max(revision, time.time_ns() // 1000)
        store = cls(opened, Records(records, revision), timeout_s, clock)
        if error is not None:
            store._log_unwritable(error)
        return store

    async def get(self, key: str) -> Record | None:
        await self._end_leases()
        return self._records.get(key)

    async def list(self, prefix: str) -> Snapshot:
        await self._end_leases()
        return self._records.take_snapshot(prefix)

    async def commit(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> int:
        await self._end_leases()
        return await self._run_change(self._commit(writes, compares))

    async def watch(self, prefix: str, after: int) -> AsyncIterator[Sequence[Change]]:
        while not self._is_closed:
            changed = self._changed
            for changes in self._records.list_changes_since(after):
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
        await self._run_change(self._end_lease(lease))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.wait(self._timeout_s)
        await asyncio.to_thread(self._file.close)

    # --- writing

    async def _run_change(self, change: Coroutine[None, None, T]) -> T:
        """Run a change in its own task, so that file and memory stay equal even if the caller is cancelled."""
        if self._is_closed:
            change.close()
            raise StoreUnavailable("the metadata store is closed")
        task = self._tasks.spawn(change, has_caller=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise StoreUnavailable(f"the metadata store's disk did not answer within {self._timeout_s} s") from error

    async def _commit(self, writes: Sequence[Write], compares: Sequence[Compare]) -> int:
        async with self._writing:
            await self._change(writes, compares)
            return self._records.revision

    async def _change(self, writes: Sequence[Write], compares: Sequence[Compare] = ()) -> None:
        changes = self._records.plan(writes, compares)
        if changes:
            await self._store_changes(changes, writes)
            self._records.apply(changes, writes)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _store_changes(self, changes: Sequence[Change], writes: Sequence[Write]) -> None:
        rows = self._build_rows(changes, writes)
        try:
            await asyncio.to_thread(self._file.write, rows, changes[0].revision)
            self._unwritten.clear()
            self._has_advised = False
        except (OSError, sqlite3.Error) as error:
            if not all(write.may_wait or write.lease for write in writes):
                log.error("metadata_not_written", file=str(self._file.path), error=explain_cause(error))
                # Without the path, because clients see the message.
                raise Unavailable(
                    f"the server's data directory cannot be written: {_describe_reason(error)}"
                ) from error
            self._unwritten |= {row[0] for row in rows}
            self._log_unwritable(error)
            for change in changes:
                event = "block_id_not_stored" if change.key.startswith("blocks/") else "metadata_not_stored"
                log.info(event, key=change.key, error=_describe_reason(error))

    def _log_unwritable(self, error: Exception) -> None:
        """Log advice about a disk that cannot be written; log it again only after the disk was writable."""
        if not self._has_advised:
            self._has_advised = True
            log.warning("metadata_unwritable", file=str(self._file.path), error=explain_cause(error), advice=ADVICE)

    def _build_rows(self, changes: Sequence[Change], writes: Sequence[Write]) -> Sequence[Row]:
        """Return the rows to write, for these changes and for earlier changes whose write failed.

        Leased records are kept only in memory: their rows delete the stored records of the same keys.
        """
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
        for lease in self._records.list_ended_leases(self._clock()):
            await self._run_change(self._end_lease(lease))

    async def _end_lease(self, lease: int) -> None:
        async with self._writing:
            await self._change(self._records.plan_lease_end(lease))
            self._records.forget_lease(lease)

    def _set_timer(self) -> None:
        """Schedule the end of the lease that ends first, so that watchers get its changes without another call."""
        ends_at = self._records.find_next_lease_end()
        if self._timer is not None:
            self._timer.cancel()
        if ends_at is not None and not self._is_closed:
            delay_s = max(0.001, ends_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_leases_later)

    def _end_leases_later(self) -> None:
        self._tasks.spawn(self._end_leases()).add_done_callback(lambda _: self._set_timer())


def _describe_reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
