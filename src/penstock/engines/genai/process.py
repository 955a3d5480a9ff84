"""One process of a generating model, from its start to its end, as the engine sees it."""

import os
import select
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any, Protocol

from penstock.core.error_text import shorten
from penstock.core.errors import ConfigError, EngineFailed, WireError, from_code
from penstock.engines.hosting.hosted import HostedProcess, HostProgram
from penstock.engines.hosting.usage import used_bytes
from penstock.wire.ipc.messages import Envelope, Inbox, Message

PING_S = 2.0
LOOK_S = 5.0  # so often it is seen whether it hangs
MIB = 1024 * 1024
_RECEIVE_BYTES = 256 * 1024


class ProcessOwner(Protocol):
    """Whom a process generates for. Called in the thread that made it."""

    @property
    def is_busy(self) -> bool:
        """Something is asked for; any thread may look."""
        ...

    def attach(self, process: "GenerationProcess") -> None:
        """It has loaded the model."""
        ...

    def hear(self, kind: str, fields: dict[str, Any]) -> None: ...

    def detach(self, process: "GenerationProcess") -> None:
        """It has ended."""
        ...


class GenerationProcess:
    """Made by a thread that outlives it, which then hears it until it ends. Any thread may send."""

    def __init__(self, owner: ProcessOwner, program: HostProgram, settings: dict[str, Any], hang_s: float) -> None:
        self.end = ""  # how it ended; empty while it runs
        self.words = ""  # its last, on stderr
        self.facts: dict[str, Any] = {}  # of the model; empty until it is loaded
        self._owner = owner
        self._settings = settings
        self._hang_s = hang_s
        self._condemned = ""  # why it is to be ended
        self._heard_at = 0.0
        self._pong = threading.Event()
        self._lock = threading.Lock()  # for what is to be sent
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
        """Does not wait: what the socket does not take goes when it does."""
        data = Message(kind, fields or {}).pack()
        with self._lock:
            if self.end:
                return
            if not self._owner.is_busy:
                self._heard_at = time.monotonic()  # from now on it owes an answer
            had_unsent = bool(self._unsent)
            self._unsent += data
            if not had_unsent:
                self._flush()
                if self._unsent:
                    os.eventfd_write(self._wake, 1)

    def problem(self) -> str:
        """What is wrong; empty: it answers, or generates, and is seen to if it hangs."""
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
        """Whatever it does: nobody waits for it any more."""
        self.kill()

    def kill(self) -> None:
        self._hosted.kill()

    # --- the thread that made it

    def load(self, timeout_s: float) -> None:
        """Raises EngineFailed where it ends meanwhile, or what is wrong with the model."""
        self.send("load", self._settings)
        deadline = time.monotonic() + timeout_s
        found: list[Envelope] = []
        while not found:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._condemned = f"it was not loaded within {timeout_s:g} s"
            if self._condemned or not self._listen(left_s, found):
                self._see_end()
                raise EngineFailed(shorten(f"{self.end}\n{self.words}".strip()), reason="process_ended")
        answer, *more = found
        if answer.kind == "failed":
            fields = answer.fields
            self._condemned = fields["message"]
            raise from_code(fields["code"], fields["message"], {"reason": fields["reason"]})
        if answer.kind != "loaded":
            raise ConfigError(f"the model's process said {answer.kind!r}, which is no answer")
        self.facts = answer.fields
        self._owner.attach(self)
        for envelope in more:
            self._heard(envelope)

    def wait_end(self) -> None:
        """Meanwhile hears it."""
        while not self._condemned:
            found: list[Envelope] = []
            if not self._listen(min(LOOK_S, self._hang_s / 4), found):
                break
            for envelope in found:
                self._heard(envelope)
            if self._owner.is_busy and time.monotonic() - self._heard_at > self._hang_s:
                self._condemned = f"it did not end a step within {self._hang_s:g} s"
        self._see_end()

    def release(self) -> None:
        """Gives back what it had. Called when it has ended."""
        if not self.end:
            self._see_end()
        with self._lock:
            self._open.close()
        self._owner.detach(self)

    def _heard(self, envelope: Envelope) -> None:
        self._heard_at = time.monotonic()
        if envelope.kind == "pong":
            self._pong.set()
        else:
            self._owner.hear(envelope.kind, envelope.fields)

    def _listen(self, timeout_s: float, found: list[Envelope]) -> bool:
        """Adds what has come, and sends what could not be sent. False: nothing will come any more."""
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
                self._flush()
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return self._receive(found)
        return self._hosted.pidfd not in ready

    def _receive(self, found: list[Envelope]) -> bool:
        try:
            chunk = self._connection.recv(_RECEIVE_BYTES)
            found += self._inbox.feed(chunk)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        except WireError as error:
            self._condemned = str(error)
            return False
        return bool(chunk)

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._connection.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, and whoever hears it sees that
            self._unsent.clear()

    def _see_end(self) -> None:
        ending = self._hosted.see_end(bool(self._condemned))
        with self._lock:
            self.end = self._condemned or ending.how
            self.words = ending.words
            self._unsent.clear()
