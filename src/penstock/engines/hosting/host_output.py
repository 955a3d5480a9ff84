"""Logs the output of a model's process line by line, up to a limited rate."""

import contextvars
import os
import selectors
import threading
import time
from dataclasses import dataclass
from typing import IO

import structlog

from penstock.core.error_text import cut_to_last_lines

LINES_PER_S = 50.0
BURST_LINES = 200
MAX_LINE_BYTES = 1000
TAIL_BYTES = 8 * 1024
FLOOD_PAUSE_S = (
    0.001  # between reads while lines are dropped, which slows the model down and not the worker's other threads
)
REPORT_S = 1.0  # interval of the reports about dropped lines
_READ_BYTES = 64 * 1024
_LAST_READS = 16  # after the process has ended, its children may still write

log = structlog.get_logger()


@dataclass(slots=True)
class Allowance:
    """Limits the rate of logged lines."""

    per_s: float
    burst: int
    remaining: float
    refilled_at: float = 0.0

    def refill(self, now: float) -> int:
        self.remaining = min(self.burst, self.remaining + (now - self.refilled_at) * self.per_s)
        self.refilled_at = now
        return int(self.remaining)

    def spend(self, lines: int) -> None:
        self.remaining -= lines


@dataclass(slots=True)
class _Stream:
    name: str
    pipe: IO[bytes]
    partial: bytes = b""  # the start of a line whose end has not arrived yet
    tail: bytes = b""

    def read(self) -> bytes | None:
        """Return the available bytes, or None if there are none."""
        try:
            return os.read(self.pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None


class ModelOutput:
    """Logs a process's stdout and stderr, in a thread that ends with the process and closes both pipes."""

    def __init__(self, model: str, instance: int, stdout: IO[bytes], stderr: IO[bytes], pidfd: int) -> None:
        self._model, self._instance = model, instance
        self._streams = (_Stream("stdout", stdout), _Stream("stderr", stderr))
        self._pidfd = os.dup(pidfd)
        self._allowance = Allowance(LINES_PER_S, BURST_LINES, BURST_LINES, time.monotonic())
        self._dropped = 0
        self._reported = time.monotonic()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run,), name=f"{model}-{instance}-output", daemon=True
        )
        self._thread.start()

    def read_last_lines(self, timeout_s: float) -> str:
        """Return the last lines that the process wrote to stderr. Call this method after the process has ended."""
        self._thread.join(timeout_s)
        return cut_to_last_lines(self._streams[1].tail.decode("utf-8", "replace"))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            for stream in self._streams:
                os.set_blocking(stream.pipe.fileno(), False)
                selector.register(stream.pipe, selectors.EVENT_READ, stream)
            is_running = True
            while is_running:
                for key, _ in selector.select(REPORT_S if self._dropped else None):
                    if key.data is None:
                        is_running = False
                    elif (chunk := key.data.read()) == b"":
                        selector.unregister(key.fileobj)
                    elif chunk:
                        self._log_complete_lines(key.data, chunk)
                if self._dropped or any(len(stream.partial) > MAX_LINE_BYTES for stream in self._streams):
                    time.sleep(FLOOD_PAUSE_S)
                self._report_dropped()
        self._read_rest()

    def _read_rest(self) -> None:
        for stream in self._streams:
            for _ in range(_LAST_READS):
                chunk = stream.read()
                if not chunk:
                    break
                self._log_complete_lines(stream, chunk)
            if stream.partial:
                self._log_complete_lines(stream, b"\n")
            stream.pipe.close()
        os.close(self._pidfd)
        self._report_dropped(is_last=True)

    def _log_complete_lines(self, stream: _Stream, chunk: bytes) -> None:
        stream.tail = (stream.tail + chunk)[-TAIL_BYTES:]
        room = self._allowance.refill(time.monotonic())
        *lines, rest = (stream.partial + chunk).split(b"\n", room)
        self._allowance.spend(len(lines))
        for line in lines:
            self._log_line(stream.name, line)
        self._dropped += rest.count(b"\n")
        # Keep only the start of a very long line, because the log cuts it off anyway.
        stream.partial = rest.rpartition(b"\n")[2][: MAX_LINE_BYTES + 1]

    def _log_line(self, stream: str, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if len(line) > MAX_LINE_BYTES:
            text += "…"
        if text:
            log.info("model_output", model=self._model, instance=self._instance, stream=stream, line=text)

    def _report_dropped(self, is_last: bool = False) -> None:
        at = time.monotonic()
        if self._dropped and (is_last or at - self._reported >= REPORT_S):
            log.warning("model_output_dropped", model=self._model, instance=self._instance, lines=self._dropped)
            self._dropped = 0
            self._reported = at
