"""Locked folders of a running server, and the folders of killed servers."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.storage.server_folders import LOCK, RUN_MARK, create_run_folder, lock_data_folder

KILLED = """
import os
from penstock.storage.server_folders import create_run_folder
with create_run_folder() as folder:
    (folder / "config.json").write_text("{}")
    print(folder, flush=True)
    os._exit(9)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tmp_path_factory.getbasetemp()  # pytest's own folder does not go with this one
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets have room for a short path alone
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_folder_is_private_and_removed_with_its_server(temporary: Path) -> None:
    with create_run_folder() as folder:
        assert folder.parent == temporary
        assert mode(folder) == 0o700
        assert mode(folder / RUN_MARK) == 0o600
    assert list(temporary.iterdir()) == []


def test_the_next_start_removes_the_folders_of_killed_servers(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, env=environment, timeout=60)
    left = Path(killed.stdout.strip())
    assert killed.returncode == 9
    assert (left / "config.json").exists()
    with create_run_folder() as folder:
        assert not left.exists()
        assert folder.exists()


def test_folders_of_other_servers_stay(temporary: Path) -> None:
    unlocked = temporary / "penstock-of-somebody"
    unlocked.mkdir()
    (temporary / "penstock-a-file").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / RUN_MARK).touch()
    (temporary / "penstock-a-link").symlink_to(elsewhere)
    with create_run_folder() as first, create_run_folder() as second:
        assert first.exists()
        assert second.exists()
    assert {path.name for path in temporary.iterdir()} == {
        "penstock-of-somebody",
        "penstock-a-file",
        "elsewhere",
        "penstock-a-link",
    }


def test_a_missing_temporary_folder_is_reported(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "none"))
    with pytest.raises(ConfigError, match=r"No such file or directory.*TMPDIR"), create_run_folder():
        pass


def test_a_path_too_long_for_sockets_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="too long for sockets; set TMPDIR"), create_run_folder():
        pass
    assert list(deep.iterdir()) == []


def test_a_data_folder_is_private_and_used_by_one_server(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    with lock_data_folder(data):
        assert mode(data) == 0o700
        assert mode(data / LOCK) == 0o600
        with (
            pytest.raises(ConfigError, match=rf"{data}: .*\(process {os.getpid()}\).*--data-dir"),
            lock_data_folder(data),
        ):
            pass
    with lock_data_folder(data):
        pass


def test_a_lock_holds_without_a_process_id_in_its_file(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"\(process unknown\)"), lock_data_folder(tmp_path):
            pass


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(ConfigError, match="cannot be used"), lock_data_folder(tmp_path / "data"):
        pass
