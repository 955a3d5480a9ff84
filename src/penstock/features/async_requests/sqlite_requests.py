"""Asynchronous requests in an SQLite file, which the gateways of one machine share."""

import asyncio
import sqlite3
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiosqlite

from penstock.core.config import AsyncSettings
from penstock.core.errors import Overloaded, StoreUnavailable
from penstock.features.async_requests.async_records import AsyncRecord, AsyncState, StoredAnswer
from penstock.storage.disk import make_private

NAMES = tuple(field.name for field in fields(AsyncRecord))
SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    request_id TEXT PRIMARY KEY, owner TEXT NOT NULL, path TEXT NOT NULL, state TEXT NOT NULL, created_at REAL NOT NULL,
    expires_at REAL NOT NULL, alive_until REAL NOT NULL, finished_at REAL NOT NULL, status INTEGER NOT NULL,
    is_cancel_asked INTEGER NOT NULL, size INTEGER NOT NULL DEFAULT 0, content_type TEXT NOT NULL DEFAULT '', body BLOB
);
CREATE INDEX IF NOT EXISTS by_expiry ON requests (expires_at);
"""
BUSY_S = 5.0
FIRST_ERROR = 400  # the smallest status of an error
UNLIMITED_BYTES = 2**53  # bytes; a number that Redis's scripts represent exactly


class SqliteAsyncStore:
    """An AsyncStore in a file."""

    def __init__(self, file: Path, settings: AsyncSettings) -> None:
        self._file = file
        self._settings = settings
        self._opening = asyncio.Lock()
        self._database: aiosqlite.Connection | None = None

    async def add(self, record: AsyncRecord, now: float) -> None:
        settings = self._settings
        await self.expire(now)
        columns, marks = ", ".join(NAMES), ", ".join("?" * len(NAMES))
        added = await self._execute_change(
            f"INSERT INTO requests ({columns}) SELECT {marks} WHERE (SELECT count(*) FROM requests) < ? "
            "AND (SELECT coalesce(sum(size), 0) FROM requests) < ?",
            (*(getattr(record, name) for name in NAMES), settings.max_requests, settings.max_bytes),
        )
        if not added:
            raise make_full_error(settings)

    async def get(self, request_id: str, now: float) -> AsyncRecord | None:
        row = await self._fetch_row(
            f"SELECT {', '.join(NAMES)} FROM requests WHERE request_id = ? AND expires_at > ?", request_id, now
        )
        if row is None:
            return None
        found: dict[str, Any] = dict(zip(NAMES, row, strict=True))
        state, is_cancel_asked = AsyncState(found["state"]), bool(found["is_cancel_asked"])
        return AsyncRecord(**{**found, "state": state, "is_cancel_asked": is_cancel_asked})

    async def get_answer(self, request_id: str) -> StoredAnswer | None:
        row = await self._fetch_row(
            "SELECT status, content_type, body FROM requests WHERE request_id = ? AND body IS NOT NULL", request_id
        )
        return None if row is None else StoredAnswer(*row)

    async def finish(self, record: AsyncRecord, answer: StoredAnswer) -> None:
        settings, size = self._settings, len(answer.body)
        values = (record.state, record.finished_at, record.expires_at, record.status, size, answer.content_type)
        changed = await self._execute_change(
            "UPDATE requests SET state = ?, finished_at = ?, expires_at = ?, status = ?, size = ?, content_type = ?, "
            "body = ? WHERE request_id = ? "
            "AND (SELECT coalesce(sum(size), 0) FROM requests WHERE request_id != ?) + ? <= ?",
            (*values, answer.body, record.request_id, record.request_id, size, limit_stored_bytes(settings, answer)),
        )
        if not changed and await self.get(record.request_id, 0.0) is not None:
            raise make_full_error(settings)

    async def ask_cancel(self, request_id: str) -> None:
        await self._execute_change("UPDATE requests SET is_cancel_asked = 1 WHERE request_id = ?", (request_id,))

    async def remove(self, request_id: str) -> None:
        await self._execute_change("DELETE FROM requests WHERE request_id = ?", (request_id,))

    async def renew(self, request_ids: Collection[str], alive_until: float) -> list[str]:
        marks = ", ".join("?" * len(request_ids))
        await self._execute_change(
            f"UPDATE requests SET alive_until = ? WHERE request_id IN ({marks})", (alive_until, *request_ids)
        )
        database = await self._open()
        asked = f"SELECT request_id FROM requests WHERE is_cancel_asked = 1 AND request_id IN ({marks})"
        return [str(row[0]) for row in await database.execute_fetchall(asked, tuple(request_ids))]

    async def expire(self, now: float) -> None:
        if self._database is not None or self._file.exists():
            await self._execute_change("DELETE FROM requests WHERE expires_at <= ?", (now,))

    async def close(self) -> None:
        if self._database is not None:
            await self._database.close()

    async def _open(self) -> aiosqlite.Connection:
        async with self._opening:
            if self._database is None:
                try:
                    self._database = await self._connect()
                except (sqlite3.Error, OSError) as error:
                    raise self._unavailable_error(error) from error
            return self._database

    async def _connect(self) -> aiosqlite.Connection:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        make_private(self._file)
        database = await aiosqlite.connect(self._file, timeout=BUSY_S, isolation_level=None)
        try:
            await database.execute("PRAGMA journal_mode = WAL")
            await database.execute("PRAGMA synchronous = NORMAL")
            await database.executescript(SCHEMA)
        except BaseException:
            await database.close()  # otherwise its thread would keep the process from ending
            raise
        return database

    async def _fetch_row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        database = await self._open()
        try:
            rows = list(await database.execute_fetchall(query, values))
        except sqlite3.Error as error:
            raise self._unavailable_error(error) from error
        return tuple(rows[0]) if rows else None

    async def _execute_change(self, statement: str, values: tuple[object, ...]) -> int:
        """Run a statement as its own transaction; return the number of changed rows."""
        database = await self._open()
        try:
            async with database.execute(statement, values) as cursor:
                return cursor.rowcount
        except sqlite3.Error as error:
            raise self._unavailable_error(error) from error

    def _unavailable_error(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"the store of asynchronous requests {self._file.name} cannot be used: {error}")


def limit_stored_bytes(settings: AsyncSettings, answer: StoredAnswer) -> int:
    """Return the limit on all stored bytes that this answer must keep. Errors have no limit, because they are short."""
    return settings.max_bytes if answer.status < FIRST_ERROR else UNLIMITED_BYTES


def make_full_error(settings: AsyncSettings) -> Overloaded:
    return Overloaded(
        f"the store of asynchronous requests is full (async_requests.max_requests is {settings.max_requests}, "
        f"max_bytes {settings.max_bytes}): fetch results and delete them, or try again later"
    )
