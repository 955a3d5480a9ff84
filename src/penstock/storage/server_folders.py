"""The data folder and the run folder (sockets, configuration) of a server, locked while the server runs."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from penstock.core.errors import ConfigError
from penstock.storage.disk import is_unwritable, lock_file

log = structlog.get_logger()
LOCK = "server.lock"
RUN_PREFIX = "penstock-"
# Names in a run folder.
MANAGER_SOCKET = "manager.sock"
CONFIG_FILE = "config.json"
RUN_MARK = "locked"  # marks a folder that a server created and locked
LONGEST_PARENT = 107 - len("/penstock-12345678/gateway-63.ipc")  # the kernel's limit for paths of sockets


@contextmanager
def create_run_folder() -> Iterator[Path]:
    """Create a temporary folder and remove it at the end; also remove the folders of servers that were killed."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}; free some space, or set TMPDIR to another folder") from error
    if len(os.fsencode(parent)) > LONGEST_PARENT:
        raise ConfigError(f"{parent}: the path is too long for sockets; set TMPDIR to a shorter path")
    _remove_abandoned(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=parent))
        lock = _lock_run_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"{parent}: the server's temporary folder cannot be created there: {error.strerror}; free some space, "
            "or set TMPDIR to another folder"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


class RunningServer(NamedTuple):
    """A server of this user on this machine."""

    folder: Path  # its run folder
    settings: dict[str, Any]  # of its configuration

    @property
    def data_dir(self) -> Path:
        return Path(self.settings["data_dir"])

    @property
    def manager(self) -> str:
        """Return the socket of the server's manager, or an empty text if the server joined a cluster."""
        socket_file = self.folder / MANAGER_SOCKET
        return f"unix:{socket_file}" if socket_file.exists() else ""


def list_running_servers() -> list[RunningServer]:
    """Return the servers and managers of this user that run on this machine."""
    files = sorted(Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*/{CONFIG_FILE}"))
    return [found for file in files if _is_locked(file.parent) and (found := _read_server(file.parent))]


def _is_locked(folder: Path) -> bool:
    """Return whether a process has locked this run folder, which means that the folder's server runs."""
    try:
        probe = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(probe).st_uid == os.geteuid()
    finally:
        os.close(probe)
    return False


def _read_server(folder: Path) -> RunningServer | None:
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    has_folder = isinstance(settings, dict) and isinstance(settings.get("data_dir"), str)
    return RunningServer(folder, settings) if has_folder else None


@contextmanager
def lock_data_folder(folder: Path) -> Iterator[None]:
    """Lock a data directory for one server. If the directory cannot be written, log a warning and do not lock it."""
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


def _lock_run_folder(folder: Path) -> int:
    """Lock a new run folder, which also prevents systemd-tmpfiles from removing it.

    The mark is created after the lock, so that a mark without a lock proves that the server is dead.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / RUN_MARK).touch(0o600)
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's run folders that no process has locked."""
    for marker in parent.glob(f"{RUN_PREFIX}*/{RUN_MARK}"):
        with suppress(OSError):  # in use, another user's, or already removed
            lock = os.open(marker.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(marker.parent)
                    log.info("run_folder_removed", folder=str(marker.parent))
            finally:
                os.close(lock)
