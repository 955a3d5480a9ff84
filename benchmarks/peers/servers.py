"""Starts a peer's server in its own process session, waits until it is ready, measures it and ends it."""

import contextlib
import http.client
import os
import signal
import subprocess
import time
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from benchmarks.peers.failures import StartFailed
from benchmarks.peers.peer import Launch

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
STOP_COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.1
MARK = "PEERS_BENCHMARK_RUN"  # environment variable that marks the processes of one server
LOG_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class ServerUsage:
    cpu_s: float  # so far
    memory_bytes: int  # pages that processes share are counted once, spread over them


class Server:
    """A context manager that starts a server, waits until it is ready, and ends all its processes on exit."""

    def __init__(self, launch: Launch, folder: Path, timeout_s: float = START_TIMEOUT_S) -> None:
        self.launch = launch
        self._log = folder / "server.log"
        self._timeout_s = timeout_s
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, **launch.environment, MARK: self._mark}
        self._folder = folder
        self._known: dict[int, psutil.Process] = {}  # also those that left the tree later

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(self.launch.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip()
        return " ".join(lines[-LOG_CHARACTERS:].split())

    def usage(self) -> ServerUsage:
        cpu_s, memory_bytes = 0.0, 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                cpu_s += times.user + times.system
                memory_bytes += process.memory_full_info().pss
        return ServerUsage(cpu_s, memory_bytes)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            status = self._process.poll()
            # A launcher that exits with status 0 may have left its server in the background.
            if status is not None and (status or not self.launch.stop_command):
                raise StartFailed(f"ended with exit status {status} before it was ready: {self.log_tail()}")
            if is_ready(self.launch.ready_url):
                return
            time.sleep(POLL_S)
        raise StartFailed(f"not ready within {self._timeout_s:g} s: {self.log_tail()}")

    def _processes(self) -> list[psutil.Process]:
        """Return all processes of the server: by parent, session or environment mark, because servers detach some."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                self._known[process.pid] = process
        for process in psutil.process_iter():
            if process.pid not in self._known and self._is_ours(process):
                self._known[process.pid] = process
        self._known = {pid: process for pid, process in self._known.items() if process.is_running()}
        return list(self._known.values())

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self._process.pid or process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):
            return False

    def __exit__(self, *_: object) -> None:
        self._processes()  # while their parents still identify them
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
        if self.launch.stop_command:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    list(self.launch.stop_command),
                    env=self._environment,
                    cwd=self._folder,
                    capture_output=True,
                    timeout=STOP_COMMAND_TIMEOUT_S,
                )
        left = self._processes()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)


def is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # connection refused, another status, or an incomplete answer
        return False
