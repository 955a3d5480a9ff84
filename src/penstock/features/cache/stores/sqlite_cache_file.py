"""The SQLite file of a gateway's cached answers. Only one process opens the file, whose header marks it as a cache."""

import sqlite3
from pathlib import Path

import aiosqlite
import structlog

from penstock.core.errors import ConfigError
from penstock.storage.disk import is_unwritable, make_private

log = structlog.get_logger()
# The id in the file's header. Only a file with this id may be deleted when it is damaged.
APPLICATION_ID = 0x50_4E_53_43
SCHEMA_VERSION = 1
# The value is the last column, so that its pages are not read with the other columns.
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY,
    expires_at REAL NOT NULL,
    size INTEGER NOT NULL,
    value BLOB NOT NULL
)
"""
BUSY_TIMEOUT_S = 2.0
_MAGIC = b"SQLite format 3\x00"
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _DamagedFile(Exception):
    pass


async def open_file(file: Path) -> aiosqlite.Connection:
    """Open the cache file; replace a damaged file by an empty one.

    Raise ConfigError if the file is not a cache or cannot be opened. Errors of a full or read-only disk are raised
    unchanged, because the file may be opened later.
    """
    if not _is_cache_file(file):
        raise ConfigError(
            f"{file} is not a response cache: delete it, or set response_cache.url to another file",
            file=str(file),
        )
    try:
        try:
            return await _connect(file)
        except _DamagedFile as damage:
            log.warning(
                "cache_file_damaged", file=str(file), error=str(damage), advice="it is replaced by an empty cache"
            )
            for suffix in ("", "-wal", "-shm", "-journal"):
                file.with_name(file.name + suffix).unlink(missing_ok=True)
            return await _connect(file)
    except (_DamagedFile, OSError, aiosqlite.Error) as error:
        if is_unwritable(error):
            raise
        raise ConfigError(
            f"{file}: the response cache cannot be opened: {error}; if another server has it open, "
            "give each server its own data_dir or response_cache.url",
            file=str(file),
        ) from error


async def _connect(file: Path) -> aiosqlite.Connection:
    make_private(file)
    connection = await aiosqlite.connect(file, timeout=BUSY_TIMEOUT_S)
    try:
        await _prepare(connection)
    except BaseException as error:
        await connection.close()  # its thread would keep the process alive
        if isinstance(error, aiosqlite.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
            raise _DamagedFile(str(error)) from error
        raise
    return connection


async def _prepare(connection: aiosqlite.Connection) -> None:
    await connection.execute("PRAGMA locking_mode=EXCLUSIVE")  # a second server finds it locked
    await connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # works only before anything is written to an empty file
    ((version,),) = await connection.execute_fetchall("PRAGMA user_version")
    if version not in (0, SCHEMA_VERSION):
        raise _DamagedFile(f"the file has version {version}, expected {SCHEMA_VERSION}")
    if version == 0:  # before the write-ahead log starts, because the header must be in the file itself
        await connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        await connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    await connection.execute("PRAGMA journal_mode=WAL")
    await connection.execute("PRAGMA synchronous=NORMAL")
    await connection.execute("PRAGMA journal_size_limit=4194304")
    await connection.execute(SCHEMA)
    await connection.commit()
    for (verdict,) in await connection.execute_fetchall("PRAGMA quick_check(1)"):
        if verdict != "ok":
            raise _DamagedFile(str(verdict))


def _is_cache_file(file: Path) -> bool:
    """Return whether the file is a response cache, is empty, or does not exist."""
    try:
        with file.open("rb") as opened:
            header = opened.read(72)
    except FileNotFoundError:
        return True
    except OSError as error:
        if is_unwritable(error):
            raise
        raise ConfigError(f"{file}: the response cache cannot be read: {error}", file=str(file)) from error
    is_cache = header.startswith(_MAGIC) and int.from_bytes(header[68:72], "big") == APPLICATION_ID
    return not header or is_cache
