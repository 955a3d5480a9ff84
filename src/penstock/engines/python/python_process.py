"""The engine's side of a Python model's process, from its start to its end."""

import itertools
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from penstock.core.error_text import shorten
from penstock.core.errors import EngineFailed, rebuild_error
from penstock.core.tensors import Tensor
from penstock.engines.engine_options import PythonOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.hosting.hosted_process import HostedProcess, HostProgram
from penstock.engines.hosting.process_usage import used_bytes
from penstock.engines.python.limit import MIB, mentions_no_memory
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_channel import IpcChannel, PeerGone
from penstock.wire.ipc.ipc_messages import Message

PING_S = 2.0
WATCH_S = 1.0  # time between two checks of the process's memory
HOST = "penstock.engines.python.python_host"
_ACTIVITIES = {"load": "was loaded", "end_session": "ended a session", "close": "closed a stream"}


@dataclass(frozen=True, slots=True)
class Program:
    """The settings with which the process of a Python model's instance is started."""

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
            "outputs": [(option.name, option.datatype, option.shape) for option in self.options.outputs],
            "is_decoupled": self.options.is_decoupled,
            "takes_packets": self.options.takes_packets,
            "memory_bytes": self.memory_bytes,
            "context": {**self.host.labels, "threads": self.spec.threads, "device": self.spec.device},
        }


class PythonProcess:
    """Starts, calls and ends a Python model's process. Linux ends the process with the thread that started it."""

    def __init__(self, program: Program) -> None:
        self.end = ""  # how the process ended; empty while it runs
        self._program = program
        self._limit = program.memory_bytes
        self._end_reason = ""  # why the process is being ended
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # held during a message and its answer, and while the process is closed
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
            self._channel = IpcChannel(ours, (to_model,), (from_model,), self._hosted.pidfd)
            self._open = stack.pop_all()

    def load(self, timeout_s: float) -> None:
        self.call("load", self._program.fields(), timeout_s)

    def call(self, kind: str, fields: dict[str, Any], timeout_s: float, tensors: Sequence[Tensor] = ()) -> Message:
        """Send a message and return the answer.

        Raise EngineFailed, or the error that the model raised for its caller.
        """
        with self._lock:
            if self.end:
                raise EngineFailed(f"the model's process has ended ({self.end})", reason="process_ended")
            try:
                reply = self._send_and_receive(Message(kind, fields, tensors), timeout_s)
            except TimeoutError:
                words = self._record_end(f"it did not answer within {timeout_s:g} s")
                problem = f"the model did not answer within {timeout_s:g} s; its process was ended{words}"
                raise EngineFailed(shorten(problem), reason="process_ended") from None
            except PeerGone as error:
                words = self._record_end(kill_reason=str(error))
                doing = _ACTIVITIES.get(kind, "ran this request")
                problem = f"the model's process ended while it {doing}: {self.end}{words}"
                raise EngineFailed(shorten(problem), reason="process_ended") from error
            if reply.fields.get("is_out_of_memory"):
                self._end_out_of_memory()
        if reply.kind == "failed":
            code, message, reason = (reply.fields[key] for key in ("code", "message", "reason"))
            raise rebuild_error(code, message, {"reason": reason} if reason else {})
        return reply

    def problem(self) -> str:
        """Return why the process does not answer, or an empty text if it answers or is running a request.

        This method does not run the model's code.
        """
        if not self._lock.acquire(blocking=False):
            return ""
        try:
            if self.end:
                return f"the model's process has ended ({self.end})"
            self._send_and_receive(Message("ping"), PING_S)
            return ""
        except TimeoutError:
            return f"the model's process did not answer within {PING_S:g} s"
        except PeerGone:
            self._record_end()
            return f"the model's process has ended ({self.end})"
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Ask the process to end; if a request is running, kill the process and its children."""
        if not self._lock.acquire(blocking=False):
            self.kill()
            return
        try:
            if not self.end:
                self._channel.send(Message("stop"), time.monotonic())
        except (TimeoutError, PeerGone):
            pass  # the process has ended, or the supervisor kills it later
        finally:
            self._lock.release()

    def kill(self) -> None:
        self._hosted.kill()

    def wait_end(self) -> None:
        """Wait until the process has ended.

        Meanwhile, check the process's memory, because Linux limits only a part of it (RLIMIT_DATA).
        """
        while not self._hosted.has_ended_within(WATCH_S if self._limit else None):
            used_mib = self.memory_mib()
            if self._limit and used_mib > self._limit // MIB:
                self._end_reason = f"its memory reached {used_mib} MiB, {_describe_limit(self._limit)}"
                self._hosted.abort()

    def memory_mib(self) -> int:
        """Return the memory of the process and its descendants, without the memory that it shares with the engine."""
        shared = sum(arena.held_bytes() for arena in self._arenas)
        return used_bytes(self.pid, shared, self._limit or 0) // MIB

    def release(self) -> None:
        """Record how the process ended, and free its resources. Called by the thread that started the process."""
        with self._lock:
            if not self.end:
                self._record_end()
            self._open.close()

    def _send_and_receive(self, message: Message, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        message.fields["call"] = number
        self._channel.send(message, deadline)
        while True:
            reply = self._channel.receive(deadline)
            # Skip the late answer to a ping that has timed out.
            if reply.fields.get("call") == number:
                return reply

    def _record_end(self, hang_reason: str = "", kill_reason: str = "") -> str:
        """Wait for the process to end, record the cause in `end`, and return the last lines of stderr.

        `hang_reason`: if not empty, kill the process and record this cause. `kill_reason`: the cause to record if the
        process does not end by itself and is killed.
        """
        ending = self._hosted.wait_end(bool(hang_reason))
        kill_reason = "" if ending.has_exited_by_itself else kill_reason
        self.end = self._end_reason or hang_reason or kill_reason or ending.description
        if ending.code and self._limit and not self._end_reason and mentions_no_memory(ending.last_lines):
            self.end += f", {_describe_limit(self._limit)}"
        return f"\n{ending.last_lines}" if ending.last_lines else ""

    def _end_out_of_memory(self) -> None:
        """Kill the process after it has reported a lack of memory."""
        self._hosted.kill()
        self._hosted.wait_end()
        self.end = "it ran out of memory" + (f", {_describe_limit(self._limit)}" if self._limit else "")


def _describe_limit(limit: int) -> str:
    return f"with a limit of {limit // MIB} MiB (python.memory_mb)"
