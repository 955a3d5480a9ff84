"""Cluster metadata in SQLite: which block a model's version is, and how its requests are routed."""

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiosqlite
import structlog

from penstock.core.errors import ConfigError, Unavailable
from penstock.storage.disk import is_unwritable, make_private

log = structlog.get_logger()

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    block_id TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    version TEXT NOT NULL,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    UNIQUE (model, version)
);
CREATE TABLE IF NOT EXISTS routing (
    model TEXT PRIMARY KEY,
    routing TEXT NOT NULL,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);
"""
BUSY_TIMEOUT_S = 5.0
ADVICE = (
    "block ids and routing changes are not kept over a restart: free some space, "
    "or give --data-dir a folder that can be written"
)


class Metadata(Protocol):
    async def block_id(self, model: str, version: str) -> str:
        """The block of this version; made on first sight, and the same ever after."""
        ...

    async def routings(self) -> dict[str, str]:
        """By model, as JSON, what stands before its model.yaml."""
        ...

    async def set_routing(self, model: str, routing: str) -> None:
        """Empty: as its model.yaml says."""
        ...

    async def close(self) -> None: ...


class SqliteMetadata:
    """All of it is in memory, and what changes is written at once.

    Where the disk is full or read-only the server goes on: new blocks have ids for this life of it, which are written
    with the next chance, and a change of routing is refused.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: aiosqlite.Connection | None = None
        self._blocks: dict[tuple[str, str], str] = {}  # (model, version) to id
        self._routings: dict[str, str] = {}
        self._unwritten: set[tuple[str, str]] = set()

    @classmethod
    async def open(cls, file: Path) -> "SqliteMetadata":
        store = cls(file)
        try:
            store._connection = await _connect(file)
            await store._read(store._connection)
        except (OSError, aiosqlite.Error) as error:
            await store.close()
            if not is_unwritable(error):
                raise ConfigError(f"{file}: the metadata store cannot be opened: {error}") from error
            log.warning("metadata_unwritable", file=str(file), error=str(error), advice=ADVICE)
            await store._read_what_is_there()
        return store

    async def block_id(self, model: str, version: str) -> str:
        key = (model, version)
        if key not in self._blocks:
            self._blocks[key] = f"blk-{secrets.token_hex(6)}"
            self._unwritten.add(key)
        if key in self._unwritten:
            try:
                await self._write(
                    "INSERT INTO blocks (block_id, model, version) VALUES (?, ?, ?)", self._blocks[key], model, version
                )
                self._unwritten.discard(key)
            except Unavailable as error:
                log.warning("block_id_not_kept", model=model, version=version, error=error.message, advice=ADVICE)
        return self._blocks[key]

    async def routings(self) -> dict[str, str]:
        return dict(self._routings)

    async def set_routing(self, model: str, routing: str) -> None:
        if routing:
            await self._write(
                "INSERT INTO routing (model, routing) VALUES (?, ?) "
                "ON CONFLICT (model) DO UPDATE SET routing = excluded.routing",
                model,
                routing,
            )
            self._routings[model] = routing
        else:
            await self._write("DELETE FROM routing WHERE model = ?", model)
            self._routings.pop(model, None)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.wait_for(connection.close(), BUSY_TIMEOUT_S)

    async def _write(self, statement: str, *values: str) -> None:
        try:
            if self._connection is None:
                self._connection = await _connect(self._file)
            await self._connection.execute(statement, values)
            await self._connection.commit()
        except (OSError, aiosqlite.Error) as error:
            if self._connection is not None:
                with suppress(aiosqlite.Error):
                    await self._connection.rollback()
            log.error("metadata_not_written", file=str(self._file), error=str(error))
            # Without the path: it goes to clients.
            raise Unavailable(f"the server's data directory cannot be written: {_reason(error)}") from error

    async def _read(self, connection: aiosqlite.Connection) -> None:
        blocks = await connection.execute_fetchall("SELECT model, version, block_id FROM blocks")
        self._blocks = {(model, version): block_id for model, version, block_id in blocks}
        routings = await connection.execute_fetchall("SELECT model, routing FROM routing")
        self._routings = {model: routing for model, routing in routings}  # noqa: C416 - rows are no pairs to mypy

    async def _read_what_is_there(self) -> None:
        """Also from a disk on which SQLite could make none of the files that it wants beside a database."""
        try:
            connection = await aiosqlite.connect(f"{self._file.absolute().as_uri()}?immutable=1", uri=True)
            try:
                await self._read(connection)
            finally:
                await connection.close()
        except aiosqlite.Error as error:  # nothing is there, or nothing yet
            log.debug("metadata_unread", error=str(error))


async def _connect(file: Path) -> aiosqlite.Connection:
    await asyncio.to_thread(make_private, file)
    connection = await aiosqlite.connect(file, timeout=BUSY_TIMEOUT_S)
    try:
        # Not WAL, whose index is mapped into memory: one server writes, now and then.
        await connection.execute("PRAGMA journal_mode=DELETE")
        await connection.executescript(_SCHEMA)
        await connection.commit()
    except BaseException:
        await connection.close()  # its thread would keep the process alive
        raise
    return connection


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
