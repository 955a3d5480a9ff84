"""Cluster metadata in SQLite: which block a model's version is, and how its requests are routed."""

import asyncio
import secrets
from pathlib import Path
from typing import Protocol

import aiosqlite

from penstock.core.errors import ConfigError

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
    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, file: Path) -> "SqliteMetadata":
        connection = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            connection = await aiosqlite.connect(file, timeout=BUSY_TIMEOUT_S)
            await connection.execute("PRAGMA journal_mode=WAL")
            await connection.executescript(_SCHEMA)
            await connection.commit()
        except (OSError, aiosqlite.Error) as error:
            if connection is not None:
                await connection.close()  # its thread would keep the process alive
            raise ConfigError(f"{file}: the metadata store cannot be opened: {error}") from error
        return cls(connection)

    async def block_id(self, model: str, version: str) -> str:
        candidate = f"blk-{secrets.token_hex(6)}"
        await self._connection.execute(
            "INSERT INTO blocks (block_id, model, version) VALUES (?, ?, ?) ON CONFLICT (model, version) DO NOTHING",
            (candidate, model, version),
        )
        await self._connection.commit()
        query = "SELECT block_id FROM blocks WHERE model = ? AND version = ?"
        ((block_id,),) = await self._connection.execute_fetchall(query, (model, version))
        return str(block_id)

    async def routings(self) -> dict[str, str]:
        async with self._connection.execute("SELECT model, routing FROM routing") as cursor:
            return {str(model): str(routing) async for model, routing in cursor}

    async def set_routing(self, model: str, routing: str) -> None:
        if routing:
            await self._connection.execute(
                "INSERT INTO routing (model, routing) VALUES (?, ?) "
                "ON CONFLICT (model) DO UPDATE SET routing = excluded.routing",
                (model, routing),
            )
        else:
            await self._connection.execute("DELETE FROM routing WHERE model = ?", (model,))
        await self._connection.commit()

    async def close(self) -> None:
        await asyncio.wait_for(self._connection.close(), BUSY_TIMEOUT_S)
