"""The folders of a server, each locked while it runs: its data, and where its processes meet."""

import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.storage.disk import is_unwritable, lock_file

log = structlog.get_logger()
LOCK = "server.lock"
RUN_PREFIX = "penstock-"
# In a run folder.
MANAGER_SOCKET = "manager.sock"
CONFIG_FILE = "config.json"
RUN_MARK = "locked"  # it is a server's, and was locked
LONGEST_PARENT = 107 - len("/penstock-12345678/gateway-63.ipc")  # the kernel's limit of a socket's path


@contextmanager
def run_folder() -> Iterator[Path]:
    """A temporary folder, gone with the server; those of servers that were killed go at the next start."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}: free some space, or set TMPDIR to another folder") from error
    if len(os.fsencode(parent)) > LONGEST_PARENT:
        raise ConfigError(f"{parent}: the path is too long for sockets; set TMPDIR to a shorter one")
    _remove_left(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=parent))
        lock = _lock_new(folder)
    except OSError as error:
        raise ConfigError(
            f"{parent}: the server's temporary folder cannot be made there: {error.strerror}; free some space, "
            "or set TMPDIR to another folder"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def local_managers(data_dir: Path) -> list[str]:
    """Where the managers of this user's servers on this machine listen: of those with this data directory, if any."""
    found = Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*/{MANAGER_SOCKET}")
    living = [file for file in sorted(found) if _answers(file)]
    ours = [file for file in living if _data_dir(file.parent) == data_dir.absolute()]
    return [f"unix:{file}" for file in ours or living]


def _answers(socket_file: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(socket_file))
        except OSError:  # of a server that was killed, or of another user
            return False
    return True


def _data_dir(run: Path) -> Path | None:
    """Of the server with that run folder."""
    try:
        return Path(json.loads((run / CONFIG_FILE).read_text())["data_dir"]).absolute()
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def data_folder(folder: Path) -> Iterator[None]:
    """One server at a time. Where it cannot be written, those who need it say so and go on without."""
    lock = None
    refusal = f"{folder}: another server uses this data directory"
    try:
        lock = lock_file(folder / LOCK, refusal, "stop it, or choose another --data-dir")
    except OSError as error:
        if not is_unwritable(error):
            raise ConfigError(f"{folder}: the data directory cannot be used: {error.strerror}") from error
        log.warning("data_dir_unwritable", data_dir=str(folder), error=error.strerror)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock_new(folder: Path) -> int:
    """The folder itself is locked, which also keeps systemd-tmpfiles away from it.

    The file comes after the lock: who finds it without the lock knows that the server is dead.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / RUN_MARK).touch(0o600)
    return lock


def _remove_left(parent: Path) -> None:
    """Our own folders whose lock nobody holds."""
    for marker in parent.glob(f"{RUN_PREFIX}*/{RUN_MARK}"):
        with suppress(OSError):  # another server's, another user's, or gone by now
            lock = os.open(marker.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(marker.parent)
                    log.info("removed_run_folder", folder=str(marker.parent))
            finally:
                os.close(lock)
