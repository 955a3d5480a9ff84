"""Private files, and errors that are caused by the disk."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from penstock.storage.disk import is_unwritable, make_private


def test_only_the_owner_can_open_a_file_and_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file"
    make_private(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text("kept")
    file.chmod(0o644)
    file.parent.chmod(0o755)
    make_private(file)
    assert file.read_text() == "kept"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o755, "an existing folder keeps its mode"


def test_another_users_file_that_we_may_write_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    make_private(tmp_path / "file")
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_full_and_read_only_disks_are_recognized(code: int) -> None:
    assert is_unwritable(OSError(code, os.strerror(code)))


def test_other_errors_do_not_count_as_errors_of_the_disk() -> None:
    assert not is_unwritable(IsADirectoryError(errno.EISDIR, "Is a directory"))
    assert not is_unwritable(ValueError("no"))
    with sqlite3.connect(":memory:") as connection, pytest.raises(sqlite3.Error) as raised:
        connection.execute("nonsense")
    connection.close()
    assert not is_unwritable(raised.value)
