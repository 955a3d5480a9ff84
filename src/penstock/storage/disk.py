"""Files that are nobody else's, on a disk that may be full or may not be written."""

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

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
