"""One process of a Python model, from its start to its end, as the engine sees it."""

import itertools
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from penstock.core.error_text import shorten
from penstock.core.errors import EngineFailed, from_code
from penstock.core.tensors import Tensor
from penstock.engines.base import EngineSpec
from penstock.engines.hosting.hosted import HostedProcess, HostProgram
from penstock.engines.hosting.usage import used_bytes
from penstock.engines.options import PythonOptions
from penstock.engines.python.limit import MIB, says_no_memory
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.channel import Channel, PeerGone
from penstock.wire.ipc.messages import Message

PING_S = 2.0
WATCH_S = 1.0  # between two looks at its memory
HOST = "penstock.engines.python.host"
_DOING = {"load": "was loaded", "end_session": "ended a session", "close": "closed a stream"}


@dataclass(frozen=True, slots=True)
class Program:
    """What an instance runs, the same in each of its processes."""

    spec: EngineSpec  # its file is <model>/<version>/model.py
    options: PythonOptions
    instance: int
    memory_bytes: int | None  # of each process; None: no limit

    @property
    def host(self) -> HostProgram:
        version = self.spec.file.parent
        return HostProgram(HOST, version.parent.name, version.name, self.instance, self.spec.threads)

    def fields(self) -> dict[str, Any]:
        return {
            "file": str(self.spec.file.absolute()),
            "class_name": self.options.class_name,
            "outputs": [(option.name, option.datatype, option.shape) for option in self.options.outputs],
            "is_decoupled": self.options.is_decoupled,
            "memory_bytes": self.memory_bytes,
            "context": {**self.host.labels, "threads": self.spec.threads, "device": self.spec.device},
        }


class PythonProcess:
    """Made by a thread that outlives it: Linux ends the process with the thread that made it."""

    def __init__(self, program: Program) -> None:
        self.end = ""  # how it ended; empty while it runs
        self._program = program
        self._limit = program.memory_bytes
        self._condemned = ""  # why it is being ended
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # one message at a time, and nothing is closed under it
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            to_model = Arena.create()
            stack.callback(to_model.close)
            from_model = Arena.create()
            stack.callback(from_model.close)
            self._arenas = (to_model, from_model)
            with theirs:
                self._hosted = HostedProcess(program.host, (theirs.fileno(), to_model.fd, from_model.fd))
            self.pid = self._hosted.pid
            stack.callback(self._hosted.close)
            self._channel = Channel(ours, (to_model,), (from_model,), self._hosted.pidfd)
            self._open = stack.pop_all()

    def load(self, timeout_s: float) -> None:
        self.call("load", self._program.fields(), timeout_s)

    def call(self, kind: str, fields: dict[str, Any], timeout_s: float, tensors: Sequence[Tensor] = ()) -> Message:
        """The process's answer. Raises EngineFailed, or what the model raises of the caller's faults."""
        with self._lock:
            if self.end:
                raise EngineFailed(f"the model's process has ended ({self.end})", reason="process_ended")
            try:
                reply = self._exchange(Message(kind, fields, tensors), timeout_s)
            except TimeoutError:
                words = self._bury(f"it did not answer within {timeout_s:g} s")
                said = f"the model did not answer within {timeout_s:g} s; its process was ended{words}"
                raise EngineFailed(shorten(said), reason="process_ended") from None
            except PeerGone as error:
                words = self._bury(lost=str(error))
                doing = _DOING.get(kind, "ran this request")
                said = f"the model's process ended while it {doing}: {self.end}{words}"
                raise EngineFailed(shorten(said), reason="process_ended") from error
            if reply.fields.get("is_out_of_memory"):
                self._end_out_of_memory()
        if reply.kind == "failed":
            code, message, reason = (reply.fields[key] for key in ("code", "message", "reason"))
            raise from_code(code, message, {"reason": reason} if reason else {})
        return reply

    def problem(self) -> str:
        """What is wrong; empty: it answers, or runs a request, which has a limit of its own. The model is not asked."""
        if not self._lock.acquire(blocking=False):
            return ""
        try:
            if self.end:
                return f"the model's process has ended ({self.end})"
            self._exchange(Message("ping"), PING_S)
            return ""
        except TimeoutError:
            return f"the model's process did not answer within {PING_S:g} s"
        except PeerGone:
            self._bury()
            return f"the model's process has ended ({self.end})"
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Asks it to leave; one that still runs a request is killed, with what it started."""
        if not self._lock.acquire(blocking=False):
            self.kill()
            return
        try:
            if not self.end:
                self._channel.send(Message("stop"), time.monotonic())
        except (TimeoutError, PeerGone):
            pass  # it leaves already, or will be killed when its time to close is over
        finally:
            self._lock.release()

    def kill(self) -> None:
        self._hosted.kill()

    def wait_end(self) -> None:
        """Meanwhile looks at its memory now and then: not all of it is what the system limits."""
        while not self._hosted.has_ended_within(WATCH_S if self._limit else None):
            used_mib = self.memory_mib()
            if self._limit and used_mib > self._limit // MIB:
                self._condemned = f"its memory came to {used_mib} MiB, {_limit(self._limit)}"
                self._hosted.abort()

    def memory_mib(self) -> int:
        """What it and the processes that it made take, without what it shares with the engine."""
        shared = sum(arena.held_bytes() for arena in self._arenas)
        return used_bytes(self.pid, shared, self._limit or 0) // MIB

    def release(self) -> None:
        """Notes how it ended and gives back what it had. Called, when it has ended, by the thread that made it."""
        with self._lock:
            if not self.end:
                self._bury()
            self._open.close()

    def _exchange(self, message: Message, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        message.fields["call"] = number
        self._channel.send(message, deadline)
        while True:
            reply = self._channel.receive(deadline)
            # The late answer to a ping that was given up is not the answer to this.
            if reply.fields.get("call") == number:
                return reply

    def _bury(self, hanging: str = "", lost: str = "") -> str:
        """Sees to its end and notes how that was; returns its last words, to be put after a sentence.

        `hanging`: why it is to be ended, though it could go on. `lost`: what is wrong if it does not end by itself.
        """
        ending = self._hosted.see_end(bool(hanging))
        lost = "" if ending.was_its_own else lost
        self.end = self._condemned or hanging or lost or ending.how
        if ending.code and self._limit and not self._condemned and says_no_memory(ending.words):
            self.end += f", {_limit(self._limit)}"
        return f"\n{ending.words}" if ending.words else ""

    def _end_out_of_memory(self) -> None:
        """It has answered, and what it leaked goes with it."""
        self._hosted.kill()
        self._hosted.see_end()
        self.end = "it ran out of memory" + (f", {_limit(self._limit)}" if self._limit else "")


def _limit(limit: int) -> str:
    return f"and it may have {limit // MIB} MiB (python.memory_mb)"
