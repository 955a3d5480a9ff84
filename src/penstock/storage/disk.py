"""Private and locked files, on disks that may be full or read-only."""

import errno
import fcntl
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError

log = structlog.get_logger()
FULL_OR_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EIO)
# SQLite's codes for the same conditions.
_SQLITE = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)


def is_unwritable(error: Exception) -> bool:
    """Return whether the disk is full, read-only or not permitted, so that a later attempt may succeed."""
    if isinstance(error, OSError):
        return error.errno in FULL_OR_READ_ONLY
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE


def make_private(file: Path) -> None:
    """Create the file if needed, readable by its owner only. SQLite gives its extra files the same mode."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(PermissionError):  # another user owns the file, and decides about its mode
            os.fchmod(opened, 0o600)
    finally:
        os.close(opened)


def lock_file(file: Path, refusal: str, advice: str) -> int:
    """Open a file and lock it until the file is closed; if another process locks it, raise ConfigError with its id."""
    make_private(file)
    lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(f"{refusal} (process {pid}); {advice}", reason="in_use") from error
    except OSError as error:
        log.warning("file_not_locked", file=str(file), error=error.strerror)  # a file system without locks
    with suppress(OSError):  # on a full disk the file is locked, but contains no process id
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
