"""The SQLite file of a metadata store: one process has it, and where it cannot be written it is read."""

import json
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.storage.disk import is_unwritable, lock_file, make_private
from penstock.storage.metadata.base import Record

log = structlog.get_logger()
BUSY_TIMEOUT_S = 3.0  # less than a call has
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    revision INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS store (revision INTEGER NOT NULL);
"""
_EARLIER = ("blocks", "routing")  # tables of Penstock 0.2
Row = tuple[str, bytes | None, int]  # key, value (None: deleted), revision


class MetadataFile:
    """Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None

    def open(self) -> tuple[list[Record], int]:
        """The records, and the revision. A file that others use, or that is no database, is refused."""
        self._take()
        self._connection = self._connect()
        return _read(self._connection)

    def write(self, rows: Iterable[Row], revision: int) -> None:
        """All or none."""
        if self._lock is None:
            self._take()
        if self._connection is None:
            self._connection = self._connect()
        with self._connection as connection:
            for key, value, at in rows:
                if value is None:
                    connection.execute("DELETE FROM records WHERE key = ?", (key,))
                else:
                    connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (key, value, at))
            connection.execute("UPDATE store SET revision = ?", (revision,))

    def read_what_is_there(self) -> tuple[list[Record], int]:
        """Also from a disk on which SQLite could make none of the files that it wants beside a database."""
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
                return _read(connection)
        except sqlite3.Error as error:  # nothing is there, or nothing yet
            log.debug("metadata_unread", error=str(error))
            return [], 0

    def close(self) -> None:
        connection, self._connection = self._connection, None
        lock, self._lock = self._lock, None
        try:
            if connection is not None:
                connection.close()
        finally:
            if lock is not None:
                os.close(lock)

    def _take(self) -> None:
        self._lock = lock_file(
            self.path.with_name(f"{self.path.name}.lock"),
            f"{self.path}: another manager uses this metadata store",
            "stop it, or give this one a file of its own; several managers of one cluster need etcd (docs/cluster.md)",
        )

    def _connect(self) -> sqlite3.Connection:
        make_private(self.path)
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            # Not WAL, whose index is mapped into memory: one manager writes, now and then.
            connection.execute("PRAGMA journal_mode=DELETE")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                _prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def open_file(file: Path) -> tuple[MetadataFile, list[Record], int, Exception | None]:
    """With the error that keeps it from being written, where it can only be read."""
    opened = MetadataFile(file)
    try:
        return opened, *opened.open(), None
    except (OSError, sqlite3.Error) as error:
        opened.close()
        if not is_unwritable(error):
            raise ConfigError(f"{file}: the metadata store cannot be opened: {error}") from error
        return opened, *opened.read_what_is_there(), error


def _prepare(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    if connection.execute("SELECT count(*) FROM store").fetchone()[0] == 0:
        earlier, revision = _read_earlier(connection)
        connection.executemany(
            "INSERT INTO records VALUES (?, ?, ?)", [(each.key, each.value, each.revision) for each in earlier]
        )
        connection.execute("INSERT INTO store VALUES (?)", (revision,))
        for table in _EARLIER:
            connection.execute(f"DROP TABLE IF EXISTS {table}")


def _read(connection: sqlite3.Connection) -> tuple[list[Record], int]:
    if "store" not in _tables(connection):
        return _read_earlier(connection)
    (revision,) = connection.execute("SELECT revision FROM store").fetchone()
    rows = connection.execute("SELECT key, value, revision FROM records ORDER BY key")
    return [Record(key, value, at) for key, value, at in rows], revision


def _read_earlier(connection: sqlite3.Connection) -> tuple[list[Record], int]:
    """What Penstock 0.2 kept: the blocks keep their ids, and routing that was changed stays changed."""
    tables = _tables(connection)
    found: list[tuple[str, bytes]] = []
    if "blocks" in tables:
        for block_id, model, version in connection.execute("SELECT block_id, model, version FROM blocks"):
            found.append((f"blocks/{block_id}", json.dumps({"model": model, "version": version}).encode()))
    if "routing" in tables:
        for model, routing in connection.execute("SELECT model, routing FROM routing"):
            found.append((f"routing/{model}", str(routing).encode()))
    return [Record(key, value, 1) for key, value in found], 1


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
