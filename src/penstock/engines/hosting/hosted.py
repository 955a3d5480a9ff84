"""One process that a model runs in, as the engine that started it sees it: its start, its output, its end."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.hosting.output import ModelOutput

GRACE_S = 1.0  # from its last word, or a signal that it may answer, to its end
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Ending:
    code: int
    was_its_own: bool  # nobody had to end it
    words: str  # the last that it wrote to stderr

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {-self.code}, {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"


@dataclass(frozen=True, slots=True)
class HostProgram:
    """What is run, the same in each process of an instance."""

    module: str  # whose `main` takes the descriptors' numbers and the process id of its engine
    model: str
    version: str
    instance: int
    threads: int

    @property
    def labels(self) -> dict[str, str | int]:
        return {"model": self.model, "version": self.version, "instance": self.instance}


class HostedProcess:
    """Made by a thread that outlives it: Linux ends the process with the thread that made it."""

    def __init__(self, program: HostProgram, fds: Sequence[int]) -> None:
        """The process inherits `fds`."""
        self._popen = _spawn(program, fds)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        try:
            self._output = ModelOutput(
                program.model, program.instance, self._popen.stdout, self._popen.stderr, self.pidfd
            )
        except BaseException:  # no more threads: it ends by itself, as nobody speaks to it
            self.close()
            raise

    def has_ended_within(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def abort(self) -> None:
        """Ends it by SIGABRT first: Python then writes where it was."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGABRT)
        if not self.has_ended_within(GRACE_S):
            self._kill_all()

    def kill(self) -> None:
        if self._popen.returncode is None:
            self._kill_all()

    def see_end(self, is_hanging: bool = False) -> Ending:
        """Returns when it has ended. One that hangs is ended at once, any other where it does not end by itself."""
        was_its_own = not is_hanging and self.has_ended_within(GRACE_S)
        if not was_its_own:
            self.abort()
        self._kill_all()
        return Ending(self._popen.wait(), was_its_own, self._output.last_words(GRACE_S))

    def close(self) -> None:
        """Call it when it has ended."""
        os.close(self.pidfd)

    def _kill_all(self) -> None:
        """Ends it and what it started, which would keep the memory, the ports and the GPU that its successor needs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _spawn(program: HostProgram, fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    # -P, -B: the folder that the server was started in is not the model's to import from, and a model's folder is
    # not ours to write to.
    python = [sys.executable, "-P", "-B", "-X", "utf8", "-m", program.module]
    return subprocess.Popen(
        [*python, *(str(number) for number in (*fds, os.getpid()))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        process_group=0,
        env={**os.environ, **dict.fromkeys(THREAD_SETTINGS, str(program.threads))},
    )
