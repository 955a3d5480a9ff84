"""The processes of a benchmark: the server and the echo; started, measured, stopped."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

START_TIMEOUT_S = 120.0


class Running:
    """A child process that is ended with its block."""

    def __init__(
        self, command: list[str], log: Path | None = None, without_ctrl_c: bool = False, **options: Any
    ) -> None:
        """`without_ctrl_c`: a terminal sends it to all processes of its group, and this one is ended by us alone."""
        try:
            with log.open("wb") if log else nullcontext() as stderr, _interrupts_after(without_ctrl_c):
                self.process = subprocess.Popen(command, stderr=stderr, **options)
        except BaseException:
            if hasattr(self, "process"):
                self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


class ServerRun(Running):
    def __init__(self, models: Path, folder: Path, *flags: str) -> None:
        self.log = folder / "server.log"
        self._ports_from = self.log
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            "--models",
            str(models),
            "--data-dir",
            str(folder / "data"),
        ]
        super().__init__([*command, "--http-port", "0", "--grpc-port", "0", *flags], self.log)
        self.http, self.grpc = self._wait_ready()

    def _wait_ready(self) -> tuple[str, str]:
        deadline = time.monotonic() + START_TIMEOUT_S
        addresses: tuple[str, str] | None = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-2000:]}")
            addresses = addresses or self._addresses()
            if addresses and _is_ready(addresses[0]):
                return addresses
            time.sleep(0.05)
        self.process.terminate()
        raise RuntimeError(f"the server was not ready in time:\n{self.log.read_text()[-2000:]}")

    def _addresses(self) -> tuple[str, str] | None:
        for line in self.log.read_text().splitlines():
            if '"event": "serving"' in line:
                found = json.loads(line)
                return found["http"].removeprefix("http://"), found["grpc"]
        return None

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by role."""
        main = psutil.Process(self.process.pid)
        found = {"gateway": _cpu_s(main), "worker": 0.0}
        for child in main.children(recursive=True):
            role = "gateway" if "gateway" in child.cmdline() else "worker"
            found[role] += _cpu_s(child)
        return found


class EchoRun(Running):
    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.suite.echo"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.target = f"127.0.0.1:{int(self.process.stdout.readline())}"


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


def _is_ready(http: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{http}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
