"""Runs a directory as a process, and runs the curl commands of its documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.waiting import eventually
from tests.servers import log_lines

STOP_S = 30.0


class DirectoryProcess:
    """A context manager that runs `penstock directory` on free ports, with its data in `folder`."""

    def __init__(
        self, folder: Path, *flags: str, http_port: int = 0, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.data_dir = folder / "directory-data"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "directory.log"
        self._flags = flags
        self._environment = {**os.environ, **(environment or {})}
        self._port = 0
        self.start()

    def start(self) -> None:
        ports = ("--http-port", str(self._port), "--health-port", "0", "--health-grpc-port", "0")
        command = [
            sys.executable,
            "-m",
            "penstock",
            "directory",
            *ports,
            "--data-dir",
            str(self.data_dir),
            *self._flags,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *self._flags], stdout=log, stderr=log, env=self._environment)
        eventually(lambda: self._started() or self.process.poll() is not None, "the directory started", 60.0)
        assert self.process.poll() is None, self.log.read_text()
        self.url = str(self._started()[0]["http"])
        self._port = int(self.url.rpartition(":")[2])  # also after a restart

    def _started(self) -> list[dict[str, Any]]:
        return [line for line in log_lines(self.log) if line["event"] == "directory_started"]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)

    def __enter__(self) -> "DirectoryProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()


def curl_commands(page: Path) -> list[str]:
    """Return the curl commands in the shell blocks of a page of documentation."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if block.startswith("curl")]


def run_curl(command: str) -> tuple[int, Any]:
    """Run a curl command as a shell does; return the status and the JSON of the answer."""
    shown = command.rstrip() + " --silent --show-error --write-out '\\n%{http_code}'"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, timeout=30, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), json.loads(body) if body else None
