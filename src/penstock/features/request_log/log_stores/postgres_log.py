"""The request log in PostgreSQL, in native partitions by time, or in TimescaleDB's hypertable.

Rows are written by COPY, one batch at a time. If the connection breaks during a batch, it is not known whether the
batch was committed, so the next attempt first looks for its rows. The primary key refuses a second copy if the old
connection commits late.
"""

import asyncio
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.core.config import RequestLogSettings
from penstock.core.errors import ConfigError
from penstock.features.request_log.log_query import COLUMNS, TABLE, LogQuery, build_sql
from penstock.features.request_log.log_row import LogRow, convert_seq_no, restore_row
from penstock.features.request_log.log_stores.log_store import SETTING, WriteResult
from penstock.features.request_log.log_stores.log_table import LogTable

if TYPE_CHECKING:
    import asyncpg

CONNECT_S = 5.0
WRITE_S = 10.0  # for one batch
READ_S = 10.0
CLOSE_S = 2.0
READERS = 4  # concurrent queries of one gateway
EPOCH_US = 946_684_800_000_000  # PostgreSQL counts from 2000
SERVER_SETTINGS = {"application_name": "penstock request log", "timezone": "UTC"}
FIND_WRITTEN = f"""SELECT count(*) FROM unnest($1::text[], $2::timestamptz[]) AS sent (request_id, ts)
JOIN {TABLE} USING (request_id, ts) WHERE gateway = $3"""
INSERT = f"""INSERT INTO {TABLE} ({", ".join(COLUMNS)})
VALUES ({", ".join(f"${number + 1}" for number in range(len(COLUMNS)))}) ON CONFLICT DO NOTHING"""


class PostgresLog:
    """A LogStore in PostgreSQL, with one connection for writes and some for queries."""

    name = "postgresql"

    def __init__(self, settings: RequestLogSettings) -> None:
        try:
            import asyncpg
        except ImportError as error:
            raise ConfigError(
                f"{SETTING}: PostgreSQL needs the 'asyncpg' package: pip install 'penstock-serve[postgres]'"
            ) from error
        self._asyncpg: Any = asyncpg
        self._url = settings.url
        self.place = _redact_url(settings.url)
        self.faults = (
            *(OSError, TimeoutError, ValueError, ConfigError),
            *(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError),
        )
        self._table = LogTable(settings)
        self._connection: asyncpg.Connection[Any] | None = None
        self._lock = asyncio.Lock()  # held while the connection is in use
        self._readers: Any = None  # asyncpg.Pool; None: nothing was queried yet
        self._is_uncertain = False  # True: the batch may already be written

    async def write(self, rows: Sequence[LogRow]) -> WriteResult:
        async with self._lock:
            connection = await self._open_writer()
            try:
                async with asyncio.timeout(WRITE_S):
                    return await self._write(connection, rows)
            except BaseException:
                self._drop_connection()
                raise

    async def find(self, query: LogQuery) -> list[LogRow]:
        sql, values = build_sql(query, "$")
        async with asyncio.timeout(READ_S):
            if self._readers is None:
                await self._open_readers()
            async with self._readers.acquire() as connection:
                found = await connection.fetch(sql, *values)
        return [restore_row(record) for record in found]

    async def delete_expired(self, now_us: int) -> int:
        async with self._lock:
            connection = await self._open_writer()
            try:
                async with asyncio.timeout(WRITE_S):
                    return await self._table.delete_expired(connection, now_us)
            except BaseException:
                self._drop_connection()
                raise

    async def close(self) -> None:
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.terminate()
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=CLOSE_S)
            except self.faults:
                connection.terminate()

    async def _write(self, connection: "asyncpg.Connection[Any]", rows: Sequence[LogRow]) -> WriteResult:
        if self._is_uncertain and (written := await _count_written(connection, rows)):
            self._is_uncertain = False
            return WriteResult(written, len(rows) - written)
        times = [row.ts_us for row in rows]
        await self._table.cover(connection, min(times), max(times))
        values = [convert_seq_no(row, Decimal) for row in rows]
        self._is_uncertain = True
        try:
            await connection.copy_records_to_table(TABLE, records=values, columns=COLUMNS)
        except self._asyncpg.CheckViolationError:  # a partition was removed from outside
            self._table.forget()
            raise
        except (self._asyncpg.DataError, self._asyncpg.IntegrityConstraintViolationError, ValueError):
            written = await _count_written(connection, rows) or await self._insert_each(connection, values)
        else:
            written = len(rows)
        self._is_uncertain = False
        return WriteResult(written, len(rows) - written)

    async def _insert_each(self, connection: "asyncpg.Connection[Any]", values: Sequence[tuple[Any, ...]]) -> int:
        """Insert rows one by one in one transaction; skip rows that the table refuses. Return the number of rows."""
        inserted = 0
        async with connection.transaction():
            for each in values:
                try:
                    async with connection.transaction():
                        inserted += (await connection.execute(INSERT, *each)).endswith(" 1")
                except (self._asyncpg.DataError, self._asyncpg.IntegrityConstraintViolationError, ValueError):
                    continue
        return inserted

    async def _open_readers(self) -> None:
        async with self._lock:
            await self._open_writer()  # creates the table
            if self._readers is None:
                self._readers = await self._asyncpg.create_pool(
                    self._url,
                    min_size=0,
                    max_size=READERS,
                    timeout=CONNECT_S,
                    command_timeout=READ_S,
                    init=_use_microseconds,
                    server_settings=SERVER_SETTINGS | {"statement_timeout": str(int(READ_S * 1000))},
                )

    async def _open_writer(self) -> "asyncpg.Connection[Any]":
        if self._connection is None or self._connection.is_closed():
            connection = await self._asyncpg.connect(
                self._url, timeout=CONNECT_S, command_timeout=WRITE_S, server_settings=SERVER_SETTINGS
            )
            try:
                async with asyncio.timeout(WRITE_S):
                    await _use_microseconds(connection)
                    await self._table.prepare(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        return self._connection

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


async def _use_microseconds(connection: "asyncpg.Connection[Any]") -> None:
    """Read and write times as microseconds since 1970, which takes less time than datetimes."""
    await connection.set_type_codec(
        "timestamptz",
        schema="pg_catalog",
        encoder=lambda us: (us - EPOCH_US,),
        decoder=lambda found: found[0] + EPOCH_US,
        format="tuple",
    )


async def _count_written(connection: "asyncpg.Connection[Any]", rows: Sequence[LogRow]) -> int:
    ids, times = [row.request_id for row in rows], [row.ts_us for row in rows]
    return int(await connection.fetchval(FIND_WRITTEN, ids, times, rows[0].gateway))


def _redact_url(url: str) -> str:
    """Return the hosts and the database in a URL, without its password."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{SETTING}: {error}") from error
    return parts.netloc.rpartition("@")[2] + parts.path
