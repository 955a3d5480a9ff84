"""The SQLite file of a metadata store, locked by one process, and only read if the disk cannot be written."""

import json
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.storage.disk import is_unwritable, lock_file, make_private
from penstock.storage.metadata.metadata_store import Record

log = structlog.get_logger()
BUSY_TIMEOUT_S = 3.0  # less than the deadline of a call
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
    """The file of a metadata store, with its connection. Only one thread may use an instance at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None

    def open(self) -> tuple[list[Record], int]:
        """Lock the file and return its records and revision; raise if the file is in use or not a database."""
        self._lock_exclusively()
        self._connection = self._connect()
        return _read_records(self._connection)

    def write(self, rows: Iterable[Row], revision: int) -> None:
        """Write all rows and the revision, or nothing."""
        if self._lock is None:
            self._lock_exclusively()
        if self._connection is None:
            self._connection = self._connect()
        with self._connection as connection:
            for key, value, at in rows:
                if value is None:
                    connection.execute("DELETE FROM records WHERE key = ?", (key,))
                else:
                    connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (key, value, at))
            connection.execute("UPDATE store SET revision = ?", (revision,))

    def read_without_lock(self) -> tuple[list[Record], int]:
        """Read a file on a disk where SQLite cannot create its extra files."""
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
                return _read_records(connection)
        except sqlite3.Error as error:  # the file does not exist or is empty
            log.debug("metadata_not_read", error=str(error))
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

    def _lock_exclusively(self) -> None:
        self._lock = lock_file(
            self.path.with_name(f"{self.path.name}.lock"),
            f"{self.path}: another manager uses this metadata store",
            "stop it, or use a separate file; several managers of one cluster need etcd (docs/cluster.md)",
        )

    def _connect(self) -> sqlite3.Connection:
        make_private(self.path)
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            # WAL is not used, because its index is mapped into memory, so that a full disk would kill the process.
            connection.execute("PRAGMA journal_mode=DELETE")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                _prepare_file(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def open_file(file: Path) -> tuple[MetadataFile, list[Record], int, Exception | None]:
    """Open the file and return it with its records and revision, and the error if it can only be read."""
    opened = MetadataFile(file)
    try:
        return opened, *opened.open(), None
    except (OSError, sqlite3.Error) as error:
        opened.close()
        if not is_unwritable(error):
            raise ConfigError(f"{file}: the metadata store cannot be opened: {error}") from error
        return opened, *opened.read_without_lock(), error


def _prepare_file(connection: sqlite3.Connection) -> None:
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


def _read_records(connection: sqlite3.Connection) -> tuple[list[Record], int]:
    if "store" not in _list_tables(connection):
        return _read_earlier(connection)
    (revision,) = connection.execute("SELECT revision FROM store").fetchone()
    rows = connection.execute("SELECT key, value, revision FROM records ORDER BY key")
    return [Record(key, value, at) for key, value, at in rows], revision


def _read_earlier(connection: sqlite3.Connection) -> tuple[list[Record], int]:
    """Read the tables of Penstock 0.2, so that block ids and changed routing survive the upgrade."""
    tables = _list_tables(connection)
    found: list[tuple[str, bytes]] = []
    if "blocks" in tables:
        for block_id, model, version in connection.execute("SELECT block_id, model, version FROM blocks"):
            found.append((f"blocks/{block_id}", json.dumps({"model": model, "version": version}).encode()))
    if "routing" in tables:
        for model, routing in connection.execute("SELECT model, routing FROM routing"):
            found.append((f"routing/{model}", str(routing).encode()))
    return [Record(key, value, 1) for key, value in found], 1


def _list_tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
