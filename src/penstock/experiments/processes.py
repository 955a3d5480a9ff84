"""Start and stop the child processes of a measurement, including the server."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from penstock.experiments.sampler import usage

START_TIMEOUT_S = 120.0
PERIOD_S = 0.05


class ChildProcess:
    """A context manager that starts a child process, and ends the process on exit."""

    def __init__(
        self, command: list[str], log: Path | None = None, ignores_ctrl_c: bool = False, **options: Any
    ) -> None:
        """Start the process. `ignores_ctrl_c`: the process ignores the SIGINT that a terminal sends for Ctrl-C."""
        try:
            with log.open("wb") if log else nullcontext() as stderr, _delay_interrupts(ignores_ctrl_c):
                self.process = subprocess.Popen(command, **{"stdout": stderr, "stderr": stderr, **options})
        except BaseException:
            if hasattr(self, "process"):
                self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the process ended before it read all of its input
                    pipe.close()


class ServerFailed(Exception):
    """The server did not start, or cannot load the model; the message contains the reason."""


class ServerRun(ChildProcess):
    """Runs `penstock serve` with its data in `folder`, on free ports unless `flags` set the ports."""

    def __init__(self, models: Path, folder: Path, *flags: str, before: Sequence[str] = (), **options: Any) -> None:
        """Start the server, and wait until it is ready. `before` is a command such as `nice` that runs the server."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        command = [*before, sys.executable, "-m", "penstock", "serve", "--models", str(models)]
        command += ["--data-dir", str(folder / "data"), "--http-port", "0", "--grpc-port", "0", *flags]
        super().__init__(command, self.log, **options)
        try:
            event = self._wait_ready()
        except BaseException:  # the `with` block has not begun, so its exit cannot end the process
            self.__exit__(None, None, None)
            raise
        self.http, self.grpc, self.workers = _read_address(event), str(event["grpc"]), int(event["workers"])

    def _wait_ready(self) -> dict[str, Any]:
        """Return the server's log event `serving` once the server is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        event: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server did not start: {self._read_last_log_line()}")
            event = event or self._serving_event()
            if event and self._is_ready(_read_address(event)):
                return event
            time.sleep(PERIOD_S)
        raise ServerFailed(f"the server was not ready within {START_TIMEOUT_S:g} s: {self._read_last_log_line()}")

    def _is_ready(self, http: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{http}/v2/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _serving_event(self) -> dict[str, Any] | None:
        for line in self.log.read_text(errors="replace").splitlines():
            if '"event": "server_started"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def _read_last_log_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("penstock: ") if lines else "its log is empty"

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds used so far by role."""
        return {role: seconds for role, (seconds, _) in usage(psutil.Process(self.process.pid)).items()}


class ExperimentServer(ServerRun):
    def __init__(self, models: Path, folder: Path, workers: int, *flags: str) -> None:
        self._workers = workers
        super().__init__(models, folder, *flags)

    def _is_ready(self, http: str) -> bool:
        """Return True if all workers have loaded the model. The server itself reports ready after the first worker."""
        try:
            with urllib.request.urlopen(f"http://{http}/v1/status", timeout=5) as answer:
                status = json.load(answer)
        except OSError:
            return False
        for block in status["blocks"]:
            if block["state"] == "failed":
                raise ServerFailed(f"the model cannot be loaded: {block['reason']}")
        holding = sum(bool(worker["blocks"]) for worker in status["workers"])
        return bool(status["ready"]) and holding >= self._workers


@contextmanager
def _delay_interrupts(masks_sigint: bool) -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the `with` block has started a process, so that the process can be ended.

    `masks_sigint`: the new process inherits a mask for SIGINT. The mask does not protect the current process, because
    another of its threads can receive the signal.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {each: signal.signal(each, lambda number, _: received.append(number)) for each in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if masks_sigint else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        if received:
            signal.raise_signal(received[0])


def _read_address(event: dict[str, Any]) -> str:
    return str(event["http"]).removeprefix("http://")
