"""The table of the request log in PostgreSQL: its schema, and its native partitions or TimescaleDB's chunks."""

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from penstock.core.config import RequestLogSettings
from penstock.core.errors import ConfigError
from penstock.features.request_log.log_query import COLUMNS, INDEXES, PARTIAL, TABLE
from penstock.features.request_log.log_stores.log_store import SETTING
from penstock.features.request_log.partitions import TimeSpan, find_expired_spans, find_missing_spans, is_covered

if TYPE_CHECKING:
    import asyncpg

LOCK = (
    0x50_4E_53_54_4C_4F_47  # id of the advisory lock in PostgreSQL with which one gateway at a time changes the schema
)
LOCK_WAIT = "2s"  # time to wait for a lock on the table, because writers and readers would wait behind it
SCHEMA = f"""CREATE TABLE {TABLE} (
    request_id TEXT NOT NULL, ts TIMESTAMPTZ NOT NULL, session_id TEXT, block_id TEXT, seq_no NUMERIC(20),
    client_ts TIMESTAMPTZ, frame_ptr BYTEA, data BYTEA, query_parameters BYTEA, output_ptr BYTEA,
    status TEXT NOT NULL, key_id TEXT, key_name TEXT, protocol TEXT NOT NULL, model TEXT NOT NULL,
    version TEXT NOT NULL, duration_ms DOUBLE PRECISION NOT NULL, request_bytes BIGINT NOT NULL,
    response_bytes BIGINT NOT NULL, data_bytes BIGINT NOT NULL, gateway TEXT NOT NULL,
    PRIMARY KEY (request_id, ts)
)"""
INDEX_STATEMENTS = [
    f"CREATE INDEX {TABLE}_{name} ON {TABLE} ({columns})"
    + (f" WHERE {columns.partition(',')[0]} IS NOT NULL" if name in PARTIAL else "")
    for name, columns in INDEXES.items()
]
FIND_KIND = f"SELECT relkind::text FROM pg_class WHERE oid = to_regclass('{TABLE}')"
FIND_COLUMNS = f"SELECT attname FROM pg_attribute WHERE attrelid = '{TABLE}'::regclass AND attnum > 0"
HAS_TIMESCALE = "SELECT count(*) FROM pg_extension WHERE extname = 'timescaledb'"
HAS_HYPERTABLE = f"SELECT count(*) FROM timescaledb_information.hypertables WHERE hypertable_name = '{TABLE}'"
MAKE_HYPERTABLE = f"""SELECT create_hypertable('{TABLE}', 'ts', chunk_time_interval => $1::interval,
create_default_indexes => FALSE)"""
FIND_PARTITIONS = f"""SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{TABLE}'::regclass
AND c.relpartbound IS NOT NULL"""
BOUNDS = re.compile(r"FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)")
PARTITIONED = "p"  # relkind of a table with native partitions
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LogTable:
    """Creates the table, and its partitions before they are needed; removes partitions that are too old."""

    def __init__(self, settings: RequestLogSettings) -> None:
        self._step_us = settings.partition_hours * 3_600_000_000
        self._retention_us = settings.retention_us
        self._is_hypertable = False
        self._spans: dict[TimeSpan, str] = {}  # the names of known partitions

    async def prepare(self, connection: "asyncpg.Connection[Any]") -> None:
        """Create the table if needed; read whether it is a hypertable, and its partitions."""
        async with connection.transaction():
            await connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
            has_timescale = bool(await connection.fetchval(HAS_TIMESCALE))
            if await connection.fetchval(FIND_KIND) is None:
                await self._create_table(connection, has_timescale)
            self._is_hypertable = has_timescale and bool(await connection.fetchval(HAS_HYPERTABLE))
            await self._check_table(connection)
            found = await self._read_partitions(connection)
        self._spans = found

    def forget(self) -> None:
        """Forget the known partitions, so that the next batch reads them again."""
        self._spans = {}

    async def cover(self, connection: "asyncpg.Connection[Any]", first_us: int, last_us: int) -> None:
        """Create the missing partitions for rows from `first_us` to `last_us`."""
        if self._is_hypertable or is_covered(list(self._spans), first_us, last_us):
            return
        async with connection.transaction():
            await self._lock_table(connection)
            self._spans = await self._read_partitions(connection)
            for span in find_missing_spans(list(self._spans), first_us, last_us, self._step_us):
                name = f"{TABLE}_{_to_datetime(span.start_us):%Y%m%d_%H%M%S}"
                # Attached afterwards, because CREATE TABLE … PARTITION OF would wait for readers, and block new ones.
                await connection.execute(f"CREATE TABLE {name} (LIKE {TABLE} INCLUDING DEFAULTS)")
                bounds = f"FROM ('{_to_datetime(span.start_us)}') TO ('{_to_datetime(span.end_us)}')"
                await connection.execute(f"ALTER TABLE {TABLE} ATTACH PARTITION {name} FOR VALUES {bounds}")
            found = await self._read_partitions(connection)
        self._spans = found

    async def delete_expired(self, connection: "asyncpg.Connection[Any]", now_us: int) -> int:
        """Create the next partition, and remove partitions with only old rows; return their number."""
        await self.cover(connection, now_us, now_us + self._step_us)
        if self._retention_us is None:
            return 0
        before_us = now_us - self._retention_us
        if self._is_hypertable:
            dropped = f"SELECT count(*) FROM drop_chunks('{TABLE}', older_than => $1::timestamptz)"
            return int(await connection.fetchval(dropped, before_us))
        return await self._drop_partitions(connection, before_us)

    async def _drop_partitions(self, connection: "asyncpg.Connection[Any]", before_us: int) -> int:
        async with connection.transaction():
            await self._lock_table(connection)
            spans = await self._read_partitions(connection)
            expired = find_expired_spans(list(spans), before_us)
            for span in expired:
                await connection.execute(f'DROP TABLE "{spans[span]}"')
            found = await self._read_partitions(connection)
        self._spans = found
        return len(expired)

    async def _create_table(self, connection: "asyncpg.Connection[Any]", has_timescale: bool) -> None:
        await connection.execute(SCHEMA if has_timescale else f"{SCHEMA} PARTITION BY RANGE (ts)")
        if has_timescale:
            interval = timedelta(microseconds=self._step_us)
            await connection.execute(MAKE_HYPERTABLE, interval)
        for statement in INDEX_STATEMENTS:
            await connection.execute(statement)

    async def _check_table(self, connection: "asyncpg.Connection[Any]") -> None:
        """Raise ConfigError if the table was not created by this class."""
        found = {record[0] for record in await connection.fetch(FIND_COLUMNS)}
        missing = [name for name in COLUMNS if name not in found]
        if missing or (not self._is_hypertable and await connection.fetchval(FIND_KIND) != PARTITIONED):
            problem = f"has no column {missing[0]}" if missing else "is not partitioned"
            raise ConfigError(f"the table {TABLE} {problem}: rename it, or name another database in {SETTING}")

    async def _lock_table(self, connection: "asyncpg.Connection[Any]") -> None:
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        await connection.execute(f"SELECT pg_advisory_xact_lock({LOCK})")

    async def _read_partitions(self, connection: "asyncpg.Connection[Any]") -> dict[TimeSpan, str]:
        found: dict[TimeSpan, str] = {}
        for name, bounds in await connection.fetch(FIND_PARTITIONS):
            if matched := BOUNDS.fullmatch(bounds):
                found[TimeSpan(_parse_us(matched[1]), _parse_us(matched[2]))] = name
        return found


def _to_datetime(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def _parse_us(text: str) -> int:
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)
