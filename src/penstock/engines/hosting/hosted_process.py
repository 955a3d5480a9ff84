"""The engine's side of a model's process: starts the process, logs the output, and ends the process."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.hosting.host_output import ModelOutput

GRACE_S = 1.0  # time for the process to end after its last message or a signal
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Ending:
    code: int
    has_exited_by_itself: bool  # False: the process was killed
    last_lines: str  # the last lines that it wrote to stderr

    @property
    def description(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {-self.code}, {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The module that an instance's process runs, and the labels of the process's logs."""

    module: str  # its arguments are the numbers of the descriptors and the engine's process id
    model: str
    version: str
    instance: int
    threads: int

    @property
    def labels(self) -> dict[str, str | int]:
        return {"model": self.model, "version": self.version, "instance": self.instance}


class HostedProcess:
    """Starts and ends a model's process. Linux ends the process together with the thread that started it."""

    def __init__(self, program: HostProgram, fds: Sequence[int]) -> None:
        """Start the process, which inherits `fds`."""
        self._popen = _spawn(program, fds)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        try:
            self._output = ModelOutput(
                program.model, program.instance, self._popen.stdout, self._popen.stderr, self.pidfd
            )
        except BaseException:  # no thread can be started; the process ends by itself when its descriptors are closed
            self.close()
            raise

    def has_ended_within(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def abort(self) -> None:
        """End the process with SIGABRT, so that Python writes a traceback, and then with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGABRT)
        if not self.has_ended_within(GRACE_S):
            self._kill_all()

    def kill(self) -> None:
        if self._popen.returncode is None:
            self._kill_all()

    def wait_end(self, is_hanging: bool = False) -> Ending:
        """Wait for the process to end, and return how it ended; kill the process if it hangs or after `GRACE_S`."""
        has_exited_by_itself = not is_hanging and self.has_ended_within(GRACE_S)
        if not has_exited_by_itself:
            self.abort()
        self._kill_all()
        return Ending(self._popen.wait(), has_exited_by_itself, self._output.read_last_lines(GRACE_S))

    def close(self) -> None:
        """Close the process's file descriptor. Call this method after the process has ended."""
        os.close(self.pidfd)

    def _kill_all(self) -> None:
        """Kill the process and its children, which would otherwise keep memory, ports and the GPU in use."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _spawn(program: HostProgram, fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    # -P: a model must not import from the server's working directory. -B: Python must not write into a model's folder.
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
