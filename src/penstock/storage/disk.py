"""Files that are nobody else's, on a disk that may be full or may not be written."""

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
# What SQLite says of the same.
_SQLITE = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)


def is_unwritable(error: Exception) -> bool:
    """The disk is full or read-only, or not ours: it may be otherwise later, and the file is not at fault."""
    if isinstance(error, OSError):
        return error.errno in FULL_OR_READ_ONLY
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE


def make_private(file: Path) -> None:
    """The file is there, and its owner's alone; SQLite gives what it puts beside a database the same mode."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(PermissionError):  # another user's, which we may write: theirs to say who else may
            os.fchmod(opened, 0o600)
    finally:
        os.close(opened)


def lock_file(file: Path, refusal: str, advice: str) -> int:
    """An open file that no other process has locked so until it is closed; the refusal names who has it."""
    make_private(file)
    lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(f"{refusal} (process {pid}); {advice}", reason="in_use") from error
    except OSError as error:
        log.warning("not_locked", file=str(file), error=error.strerror)  # a file system without locks
    with suppress(OSError):  # a full disk: the lock holds without a name on it
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
