"""The request log in a SQLite file, which all gateways of a machine share."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import aiosqlite

from penstock.core.config import RequestLogSettings
from penstock.features.request_log.log_query import COLUMNS, INDEXES, PARTIAL, TABLE, LogQuery, build_sql
from penstock.features.request_log.log_row import LogRow, convert_seq_no, restore_row
from penstock.features.request_log.log_stores.log_store import WriteResult
from penstock.storage.disk import make_private

BUSY_TIMEOUT_S = 5.0  # wait this long while another gateway writes
READ_S = 10.0
CLOSE_S = 5.0
DELETED_ROWS = 5000  # per transaction, because writers have to wait for it
# Times are microseconds since 1970. SQLite's integers have a sign, so numbers up to 2^64 are stored as text.
SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS {TABLE} (
    request_id TEXT NOT NULL, ts INTEGER NOT NULL, session_id TEXT, block_id TEXT, seq_no TEXT, client_ts INTEGER,
    frame_ptr BLOB, data BLOB, query_parameters BLOB, output_ptr BLOB,
    status TEXT NOT NULL, key_id TEXT, key_name TEXT, protocol TEXT NOT NULL, model TEXT NOT NULL,
    version TEXT NOT NULL, duration_ms REAL NOT NULL, request_bytes INTEGER NOT NULL, response_bytes INTEGER NOT NULL,
    data_bytes INTEGER NOT NULL, gateway TEXT NOT NULL,
    PRIMARY KEY (request_id, ts)
)""",
    *(
        f"CREATE INDEX IF NOT EXISTS {TABLE}_{name} ON {TABLE} ({columns})"
        + (f" WHERE {columns.partition(',')[0]} IS NOT NULL" if name in PARTIAL else "")
        for name, columns in INDEXES.items()
    ),
]
INSERT = f"INSERT OR IGNORE INTO {TABLE} VALUES ({', '.join('?' * len(COLUMNS))})"
DELETE = f"DELETE FROM {TABLE} WHERE rowid IN (SELECT rowid FROM {TABLE} WHERE ts < ? LIMIT {DELETED_ROWS})"


class SqliteLog:
    """A LogStore in a file. Each call of SQLite runs in the connection's thread."""

    name = "sqlite"
    faults = (OSError, aiosqlite.Error)

    def __init__(self, file: Path, settings: RequestLogSettings) -> None:
        self.place = str(file)
        self._file = file
        self._retention_us = settings.retention_us
        self._connection: aiosqlite.Connection | None = None
        self._reader: aiosqlite.Connection | None = (
            None  # a separate connection, so that writes do not wait for queries
        )
        self._lock = asyncio.Lock()

    async def write(self, rows: Sequence[LogRow]) -> WriteResult:
        values = [convert_seq_no(row, str) for row in rows]
        async with self._lock:
            connection = await self._open_writer()
            try:
                cursor = await connection.executemany(INSERT, values)
                await connection.commit()
            except BaseException:
                await connection.rollback()
                raise
        return WriteResult(cursor.rowcount, len(rows) - cursor.rowcount)

    async def find(self, query: LogQuery) -> list[LogRow]:
        sql, values = build_sql(query, "?")
        reader = await self._open_reader()
        try:
            async with asyncio.timeout(READ_S):
                found = await reader.execute_fetchall(sql, values)
        except TimeoutError:
            await reader.interrupt()  # queries that wait for the connection's thread fail, too
            raise
        return [restore_row(row) for row in found]

    async def delete_expired(self, now_us: int) -> int:
        if self._retention_us is None:
            return 0
        removed, last = 0, DELETED_ROWS
        while last == DELETED_ROWS:
            async with self._lock:
                connection = await self._open_writer()
                cursor = await connection.execute(DELETE, (now_us - self._retention_us,))
                await connection.commit()
                last = cursor.rowcount
                if last:
                    # As a script, because a single execute would free only one page.
                    await connection.executescript("PRAGMA incremental_vacuum")
            removed += last
        return removed

    async def close(self) -> None:
        for connection in (self._connection, self._reader):
            if connection is not None:
                await asyncio.wait_for(connection.close(), CLOSE_S)
        self._connection = self._reader = None

    async def _open_reader(self) -> aiosqlite.Connection:
        async with self._lock:
            await self._open_writer()  # creates the table
            if self._reader is None:
                self._reader = await _connect(self._file)
            return self._reader

    async def _open_writer(self) -> aiosqlite.Connection:
        if self._connection is None:
            make_private(self._file)
            connection = await _connect(self._file)
            try:
                for statement in SCHEMA:
                    await connection.execute(statement)
                await connection.commit()
            except BaseException:
                await connection.close()  # its thread would keep the process alive
                raise
            self._connection = connection
        return self._connection


async def _connect(file: Path) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(file, timeout=BUSY_TIMEOUT_S)
    try:
        await connection.execute(
            "PRAGMA auto_vacuum=INCREMENTAL"
        )  # works only before anything is written to an empty file
        await connection.execute("PRAGMA journal_mode=WAL")
        await connection.execute("PRAGMA synchronous=NORMAL")
    except sqlite3.Error:
        await connection.close()
        raise
    return connection
