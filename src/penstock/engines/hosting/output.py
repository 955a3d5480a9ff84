"""What a model prints in its process: line by line to the log, within what a log can bear."""

import contextvars
import os
import selectors
import threading
import time
from dataclasses import dataclass
from typing import IO

import structlog

from penstock.core.error_text import tail

LINES_PER_S = 50.0
BURST_LINES = 200
MAX_LINE_BYTES = 1000
TAIL_BYTES = 8 * 1024
FLOOD_PAUSE_S = 0.001  # between reads of what is dropped: whoever floods waits, not the worker's other threads
REPORT_S = 1.0  # how often dropped lines are told of
_READ_BYTES = 64 * 1024
_LAST_READS = 16  # once the process has ended, another that it made may still be writing

log = structlog.get_logger()


@dataclass(slots=True)
class Allowance:
    """How many lines may be logged now. Decides; has no clock of its own."""

    per_s: float
    burst: int
    left: float
    at: float = 0.0

    def room(self, now: float) -> int:
        self.left = min(self.burst, self.left + (now - self.at) * self.per_s)
        self.at = now
        return int(self.left)

    def take(self, lines: int) -> None:
        self.left -= lines


@dataclass(slots=True)
class _Stream:
    name: str
    pipe: IO[bytes]
    partial: bytes = b""  # a line whose end has not come
    tail: bytes = b""

    def read(self) -> bytes | None:
        """What is there now; None: nothing."""
        try:
            return os.read(self.pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None


class ModelOutput:
    """Reads both pipes in a thread of its own until the process has ended, and closes them."""

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

    def last_words(self, timeout_s: float) -> str:
        """The last of what it wrote to stderr. Call it when the process has ended: the rest is awaited."""
        self._thread.join(timeout_s)
        return tail(self._streams[1].tail.decode("utf-8", "replace"))

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
                        self._take(key.data, chunk)
                if self._dropped or any(len(stream.partial) > MAX_LINE_BYTES for stream in self._streams):
                    time.sleep(FLOOD_PAUSE_S)
                self._report()
        self._finish()

    def _finish(self) -> None:
        for stream in self._streams:
            for _ in range(_LAST_READS):
                chunk = stream.read()
                if not chunk:
                    break
                self._take(stream, chunk)
            if stream.partial:
                self._take(stream, b"\n")
            stream.pipe.close()
        os.close(self._pidfd)
        self._report(is_last=True)

    def _take(self, stream: _Stream, chunk: bytes) -> None:
        stream.tail = (stream.tail + chunk)[-TAIL_BYTES:]
        room = self._allowance.room(time.monotonic())
        *lines, rest = (stream.partial + chunk).split(b"\n", room)
        self._allowance.take(len(lines))
        for line in lines:
            self._log_line(stream.name, line)
        self._dropped += rest.count(b"\n")
        # The head of an endless line is enough: what is longer is cut when it ends.
        stream.partial = rest.rpartition(b"\n")[2][: MAX_LINE_BYTES + 1]

    def _log_line(self, stream: str, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if len(line) > MAX_LINE_BYTES:
            text += "…"
        if text:
            log.info("model_output", model=self._model, instance=self._instance, stream=stream, line=text)

    def _report(self, is_last: bool = False) -> None:
        at = time.monotonic()
        if self._dropped and (is_last or at - self._reported >= REPORT_S):
            log.warning("model_output_dropped", model=self._model, instance=self._instance, lines=self._dropped)
            self._dropped = 0
            self._reported = at
