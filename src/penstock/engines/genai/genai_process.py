"""The engine's side of a generating model's process, from its start to its end."""

import os
import select
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any, Protocol

from penstock.core.error_text import shorten
from penstock.core.errors import ConfigError, EngineFailed, WireError, rebuild_error
from penstock.engines.hosting.hosted_process import HostedProcess, HostProgram
from penstock.engines.hosting.process_usage import used_bytes
from penstock.wire.ipc.ipc_messages import Envelope, Inbox, Message

PING_S = 2.0
CHECK_S = 5.0  # interval of the check for a hanging process
MIB = 1024 * 1024
_RECEIVE_BYTES = 256 * 1024


class ProcessOwner(Protocol):
    """The engine that started a process. Its methods are called in the thread that started the process."""

    @property
    def is_busy(self) -> bool:
        """True if a generation is running or waiting. Any thread may read this property."""
        ...

    def attach(self, process: "GenerationProcess") -> None:
        """Use a process that has loaded the model."""
        ...

    def on_message(self, kind: str, fields: dict[str, Any]) -> None: ...

    def detach(self, process: "GenerationProcess") -> None:
        """Stop using a process that has ended."""
        ...


class GenerationProcess:
    """Runs a generating model's process. The thread that starts the process reads its messages until it ends."""

    def __init__(self, owner: ProcessOwner, program: HostProgram, settings: dict[str, Any], hang_s: float) -> None:
        self.end = ""  # how the process ended; empty while it runs
        self.last_lines = ""  # the last lines that it wrote to stderr
        self.facts: dict[str, Any] = {}  # about the model; empty until it is loaded
        self._owner = owner
        self._settings = settings
        self._hang_s = hang_s
        self._end_reason = ""  # why the process must be ended
        self._received_at = 0.0
        self._pong = threading.Event()
        self._lock = threading.Lock()  # guards `_unsent`
        self._unsent = bytearray()
        self._inbox = Inbox()
        with ExitStack() as stack:
            self._connection, theirs = socket.socketpair()
            stack.enter_context(self._connection)
            self._connection.setblocking(False)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(os.close, self._wake)
            with theirs:
                self._hosted = HostedProcess(program, (theirs.fileno(),))
            self.pid = self._hosted.pid
            stack.callback(self._hosted.close)
            self._open = stack.pop_all()

    # --- any thread

    def send(self, kind: str, fields: dict[str, Any] | None = None) -> None:
        """Send a message without waiting; bytes that the socket does not accept now are sent later."""
        data = Message(kind, fields or {}).pack()
        with self._lock:
            if self.end:
                return
            if not self._owner.is_busy:
                self._received_at = time.monotonic()  # the time in which the process must answer begins now
            had_unsent = bool(self._unsent)
            self._unsent += data
            if not had_unsent:
                self._send_unsent()
                if self._unsent:
                    os.eventfd_write(self._wake, 1)

    def problem(self) -> str:
        """Return why the process does not answer, or an empty text if it answers or is busy.

        A busy process that hangs is detected by `wait_end`.
        """
        if self.end:
            return f"the model's process has ended ({self.end})"
        if self._owner.is_busy:
            return ""
        self._pong.clear()
        self.send("ping")
        return "" if self._pong.wait(PING_S) else f"the model's process did not answer within {PING_S:g} s"

    def memory_mib(self) -> int:
        return used_bytes(self.pid, 0, 0) // MIB

    def stop(self) -> None:
        """Kill the process even if it is busy, because its answers are no longer needed."""
        self.kill()

    def kill(self) -> None:
        self._hosted.kill()

    # --- the thread that started the process

    def load(self, timeout_s: float) -> None:
        """Load the model; raise the error that the process reports, or EngineFailed if the process ends."""
        self.send("load", self._settings)
        deadline = time.monotonic() + timeout_s
        envelopes: list[Envelope] = []
        while not envelopes:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._end_reason = f"the model did not load within {timeout_s:g} s"
            if self._end_reason or not self._exchange_messages(left_s, envelopes):
                self._record_end()
                raise EngineFailed(shorten(f"{self.end}\n{self.last_lines}".strip()), reason="process_ended")
        answer, *more = envelopes
        if answer.kind == "failed":
            fields = answer.fields
            self._end_reason = fields["message"]
            raise rebuild_error(fields["code"], fields["message"], {"reason": fields["reason"]})
        if answer.kind != "loaded":
            raise ConfigError(f"the model's process answered 'load' with {answer.kind!r}, not with 'loaded'")
        self.facts = answer.fields
        self._owner.attach(self)
        for envelope in more:
            self._handle_message(envelope)

    def wait_end(self) -> None:
        """Read messages until the process ends; kill the process if it hangs."""
        while not self._end_reason:
            envelopes: list[Envelope] = []
            if not self._exchange_messages(min(CHECK_S, self._hang_s / 4), envelopes):
                break
            for envelope in envelopes:
                self._handle_message(envelope)
            if self._owner.is_busy and time.monotonic() - self._received_at > self._hang_s:
                self._end_reason = f"a step did not end within {self._hang_s:g} s"
        self._record_end()

    def release(self) -> None:
        """Close the connection, and notify the owner. Called when the process has ended."""
        if not self.end:
            self._record_end()
        with self._lock:
            self._open.close()
        self._owner.detach(self)

    def _handle_message(self, envelope: Envelope) -> None:
        self._received_at = time.monotonic()
        if envelope.kind == "pong":
            self._pong.set()
        else:
            self._owner.on_message(envelope.kind, envelope.fields)

    def _exchange_messages(self, timeout_s: float, envelopes: list[Envelope]) -> bool:
        """Append new messages to `envelopes`, and send unsent bytes; return False if no more messages will arrive."""
        with self._lock:
            out = select.POLLOUT if self._unsent else 0
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | out)
        poll.register(self._hosted.pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(timeout_s * 1000))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        events = ready.get(self._connection.fileno(), 0)
        if events & select.POLLOUT:
            with self._lock:
                self._send_unsent()
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return self._receive(envelopes)
        return self._hosted.pidfd not in ready

    def _receive(self, envelopes: list[Envelope]) -> bool:
        try:
            chunk = self._connection.recv(_RECEIVE_BYTES)
            envelopes += self._inbox.feed(chunk)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        except WireError as error:
            self._end_reason = str(error)
            return False
        return bool(chunk)

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                sent = self._connection.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the process has ended, which the reading thread notices
            self._unsent.clear()

    def _record_end(self) -> None:
        ending = self._hosted.wait_end(bool(self._end_reason))
        with self._lock:
            self.end = self._end_reason or ending.description
            self.last_lines = ending.last_lines
            self._unsent.clear()
