"""Child processes of a measurement, and the server among them: started, measured, stopped."""

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


class Running:
    """A child process that is ended with its block."""

    def __init__(
        self, command: list[str], log: Path | None = None, without_ctrl_c: bool = False, **options: Any
    ) -> None:
        """`without_ctrl_c`: a terminal sends it to all processes of its group, and this one is ended by us alone."""
        try:
            with log.open("wb") if log else nullcontext() as stderr, _interrupts_after(without_ctrl_c):
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
                with suppress(OSError):  # what it did not read any more
                    pipe.close()


class ServerFailed(Exception):
    """The server did not start, or cannot load the model; its message says why."""


class ServerRun(Running):
    """`penstock serve` in `folder`, on free ports where `flags` name none; ready when it has been made."""

    def __init__(self, models: Path, folder: Path, *flags: str, before: Sequence[str] = (), **options: Any) -> None:
        """`before` is a command that becomes it, or starts it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        command = [*before, sys.executable, "-m", "penstock", "serve", "--models", str(models)]
        command += ["--data-dir", str(folder / "data"), "--http-port", "0", "--grpc-port", "0", *flags]
        super().__init__(command, self.log, **options)
        try:
            said = self._wait_ready()
        except BaseException:  # its own block has not begun
            self.__exit__(None, None, None)
            raise
        self.http, self.grpc, self.workers = _address(said), str(said["grpc"]), int(said["workers"])

    def _wait_ready(self) -> dict[str, Any]:
        """Returns what it said of itself."""
        deadline = time.monotonic() + START_TIMEOUT_S
        said: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server did not start: {self._last_words()}")
            said = said or self._said()
            if said and self._is_ready(_address(said)):
                return said
            time.sleep(PERIOD_S)
        raise ServerFailed(f"the server was not ready within {START_TIMEOUT_S:g} s: {self._last_words()}")

    def _is_ready(self, http: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{http}/v2/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _said(self) -> dict[str, Any] | None:
        for line in self.log.read_text(errors="replace").splitlines():
            if '"event": "serving"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("penstock: ") if lines else "it said nothing"

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by role."""
        return {role: seconds for role, (seconds, _) in usage(psutil.Process(self.process.pid)).items()}


@contextmanager
def _interrupts_after(has_mask: bool) -> Iterator[None]:
    """An interrupt while a process starts comes when it has: else nobody would know the process, and end it.

    A mask is inherited by the process. It does not keep an interrupt from us: another thread takes it in our place.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if has_mask else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        if heard:
            signal.raise_signal(heard[0])


def _address(said: dict[str, Any]) -> str:
    return str(said["http"]).removeprefix("http://")
