"""One process of a Python model, from its start to its end, as the engine sees it."""

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
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
from penstock.engines.options import PythonOptions
from penstock.engines.python.limit import MIB, says_no_memory
from penstock.engines.python.output import ModelOutput
from penstock.engines.python.usage import used_bytes
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.channel import Channel, PeerGone
from penstock.wire.ipc.messages import Message

PING_S = 2.0
WATCH_S = 1.0  # between two looks at its memory
GRACE_S = 1.0  # from its last word, or a signal that it may answer, to its end
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_DOING = {"load": "was loaded", "end_session": "ended a session", "close": "closed a stream"}


@dataclass(frozen=True, slots=True)
class Program:
    """What an instance runs, the same in each of its processes."""

    spec: EngineSpec  # its file is <model>/<version>/model.py
    options: PythonOptions
    instance: int
    memory_bytes: int | None  # of each process; None: no limit

    @property
    def model(self) -> str:
        return self.spec.file.parent.parent.name

    @property
    def labels(self) -> dict[str, str | int]:
        return {"model": self.model, "version": self.spec.file.parent.name, "instance": self.instance}

    def fields(self) -> dict[str, Any]:
        return {
            "file": str(self.spec.file.absolute()),
            "class_name": self.options.class_name,
            "outputs": [(option.name, option.datatype, option.shape) for option in self.options.outputs],
            "is_decoupled": self.options.is_decoupled,
            "memory_bytes": self.memory_bytes,
            "context": {**self.labels, "threads": self.spec.threads, "device": self.spec.device},
        }


class PythonProcess:
    """Made by a thread that outlives it: Linux ends the process with the thread that made it."""

    def __init__(self, program: Program) -> None:
        self.end = ""  # how it ended; empty while it runs
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
                self._popen = _spawn((theirs.fileno(), to_model.fd, from_model.fd), program.spec.threads)
            self.pid = self._popen.pid
            self._pidfd = os.pidfd_open(self.pid)
            stack.callback(os.close, self._pidfd)
            assert self._popen.stdout is not None
            assert self._popen.stderr is not None
            self._output = ModelOutput(
                program.model, program.instance, self._popen.stdout, self._popen.stderr, self._pidfd
            )
            self._channel = Channel(ours, (to_model,), (from_model,), self._pidfd)
            self._open = stack.pop_all()

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

    def stop(self, timeout_s: float) -> None:
        """Asks it to leave; one that runs a request for longer than this is killed."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            self.kill()
            return
        try:
            if not self.end:
                self._channel.send(Message("stop"), deadline)
        except (TimeoutError, PeerGone):
            pass  # it leaves already, or will be killed when its time to close is over
        finally:
            self._lock.release()

    def kill(self) -> None:
        if self._popen.returncode is None:
            self._kill_all()

    def wait_end(self) -> None:
        """Meanwhile looks at its memory now and then: not all of it is what the system limits."""
        while not self._has_ended_within(WATCH_S if self._limit else None):
            used_mib = self.memory_mib()
            if self._limit and used_mib > self._limit // MIB:
                self._condemned = f"its memory came to {used_mib} MiB, {_limit(self._limit)}"
                self._abort()

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
        if hanging or not self._has_ended_within(GRACE_S):
            self._abort()
        else:
            lost = ""
        self._kill_all()
        code = self._popen.wait()
        words = self._output.last_words(GRACE_S)
        self.end = self._condemned or hanging or lost or _describe(code)
        if code and self._limit and not self._condemned and says_no_memory(words):
            self.end += f", {_limit(self._limit)}"
        return f"\n{words}" if words else ""

    def _abort(self) -> None:
        """Ends it by SIGABRT first: Python then writes where it was."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGABRT)
        if not self._has_ended_within(GRACE_S):
            self._kill_all()

    def _end_out_of_memory(self) -> None:
        """It has answered, and what it leaked goes with it."""
        self._kill_all()
        self._popen.wait()
        self.end = "it ran out of memory" + (f", {_limit(self._limit)}" if self._limit else "")

    def _kill_all(self) -> None:
        """Ends it and what it started, which would keep the memory, the ports and the GPU that its successor needs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _has_ended_within(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _spawn(fds: tuple[int, int, int], threads: int) -> "subprocess.Popen[bytes]":
    # -P, -B: the folder that the server was started in is not the model's to import from, and a model's folder is
    # not ours to write to.
    program = [sys.executable, "-P", "-B", "-X", "utf8", "-m", "penstock.engines.python.host"]
    return subprocess.Popen(
        [*program, *(str(number) for number in (*fds, os.getpid()))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        process_group=0,
        env={**os.environ, **dict.fromkeys(THREAD_SETTINGS, str(threads))},
    )


def _limit(limit: int) -> str:
    return f"and it may have {limit // MIB} MiB (python.memory_mb)"


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
