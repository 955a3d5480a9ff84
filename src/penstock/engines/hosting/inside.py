"""What the program of a model's process does first: it is tied to its engine, and what it writes goes there."""

import ctypes
import faulthandler
import fcntl
import io
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def inherit() -> list[int]:
    """The descriptors that the engine handed over, which no process that the model makes has."""
    *fds, parent = (int(word) for word in sys.argv[1:])
    _end_with(parent)
    del sys.argv[1:]
    for fd in fds:
        os.set_inheritable(fd, False)
    # Not to fd 2 itself, which a model may close, or make something else of.
    faulthandler.enable(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 100), all_threads=False)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return fds


def _end_with(parent: int) -> None:
    """The process must not outlive its engine, however that ends; nor leave before it by a Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the engine that started this process is gone")
