"""The directory's records, in memory and in a SQLite file that is read at the start."""

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiosqlite
import orjson

from penstock.core.errors import ConfigError, DeadlineExceeded, StoreUnavailable
from penstock.features.directory.directory_store import KINDS, DirectoryRecord, Kind, RecordSearch
from penstock.storage.disk import make_private

BUSY_TIMEOUT_S = 2.0
FIND_S = 3.0  # for a query
MAX_SEARCHES = 2  # concurrent queries; further queries wait
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL,
    record_id TEXT NOT NULL,
    document BLOB NOT NULL,
    owner TEXT NOT NULL,
    expires_at REAL NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (kind, record_id)
) WITHOUT ROWID
"""
Records = dict[str, DirectoryRecord]


@dataclass(slots=True)
class SqliteDirectory:
    """A DirectoryStore in a file of one process. The records are also in memory, where queries search them."""

    path: Path
    _connection: aiosqlite.Connection
    _records: dict[Kind, Records]
    _changing: asyncio.Lock
    _searching: asyncio.Semaphore

    @classmethod
    async def open(cls, path: Path) -> "SqliteDirectory":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_private(path)
            connection = await aiosqlite.connect(path, timeout=BUSY_TIMEOUT_S)
            try:
                await connection.execute("PRAGMA locking_mode=EXCLUSIVE")
                await connection.execute("PRAGMA journal_mode=WAL")
                await connection.execute(
                    "PRAGMA synchronous=NORMAL"
                )  # a crash of the machine may lose the last renewals
                await connection.execute(SCHEMA)
                await connection.commit()
                records = await _read_records(connection)
            except BaseException:
                await connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: the directory's file cannot be opened: {error}") from error
        return cls(path, connection, records, asyncio.Lock(), asyncio.Semaphore(MAX_SEARCHES))

    async def get(self, record_kind: Kind, record_id: str) -> DirectoryRecord | None:
        return self._records[record_kind].get(record_id)

    async def put(self, record_kind: Kind, record: DirectoryRecord, replaces: int) -> bool:
        row = (
            record_kind,
            record.record_id,
            orjson.dumps(record.document),
            record.owner,
            record.expires_at,
            record.revision,
        )
        async with self._changing:
            if self._stored_revision(record_kind, record.record_id) != replaces:
                return False
            await self._write("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)", [row])
            self._records[record_kind][record.record_id] = record
        return True

    async def delete(self, record_kind: Kind, record_id: str, revision: int) -> bool:
        async with self._changing:
            if self._stored_revision(record_kind, record_id) != revision:
                return False
            await self._write("DELETE FROM records WHERE kind = ? AND record_id = ?", [(record_kind, record_id)])
            del self._records[record_kind][record_id]
        return True

    async def find(self, record_kind: Kind, search: RecordSearch) -> list[DirectoryRecord]:
        """Search in a thread, so that a long query does not stop the event loop."""
        async with self._searching:
            return await asyncio.to_thread(_search, list(self._records[record_kind].values()), search)

    async def count(self, record_kind: Kind) -> int:
        return len(self._records[record_kind])

    async def remove_expired(self, now: float) -> int:
        async with self._changing:
            ended = [
                (record_kind, record.record_id)
                for record_kind, records in self._records.items()
                for record in records.values()
                if record.expires_at <= now
            ]
            if ended:
                await self._write("DELETE FROM records WHERE kind = ? AND record_id = ?", ended)
            for record_kind, record_id in ended:
                del self._records[record_kind][record_id]
        return len(ended)

    async def close(self) -> None:
        await self._connection.close()

    def _stored_revision(self, record_kind: Kind, record_id: str) -> int:
        found = self._records[record_kind].get(record_id)
        return 0 if found is None else found.revision

    async def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            await self._connection.executemany(statement, rows)
            await self._connection.commit()
        except sqlite3.Error as error:
            await self._connection.rollback()
            raise StoreUnavailable(f"the directory's file cannot be written: {error}; free some space") from error


async def _read_records(connection: aiosqlite.Connection) -> dict[Kind, Records]:
    found: dict[Kind, Records] = {record_kind: {} for record_kind in KINDS}
    async with connection.execute("SELECT * FROM records ORDER BY record_id") as rows:
        async for record_kind, record_id, document, *rest in rows:
            found[record_kind][record_id] = DirectoryRecord(record_id, orjson.loads(document), *rest)
    return found


def _search(records: list[DirectoryRecord], search: RecordSearch) -> list[DirectoryRecord]:
    deadline = time.monotonic() + FIND_S
    found = []
    for record in sorted(records, key=lambda record: record.record_id):
        if record.record_id <= search.after or record.expires_at <= search.now:
            continue
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the query took more than {FIND_S:g} s: add conditions to the query")
        if search.test(record.document):
            found.append(record)
            if len(found) >= search.limit:
                break
    return found
