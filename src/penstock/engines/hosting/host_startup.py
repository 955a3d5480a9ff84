"""Prepares a model's process: takes over file descriptors, and makes sure that the process ends with its engine."""

import ctypes
import faulthandler
import fcntl
import io
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def take_over_descriptors() -> list[int]:
    """Return the file descriptors that the engine passed to this process; child processes do not inherit them."""
    *fds, parent = (int(word) for word in sys.argv[1:])
    _end_with_parent(parent)
    del sys.argv[1:]
    for fd in fds:
        os.set_inheritable(fd, False)
    # A copy of descriptor 2, because a model may close or replace descriptor 2.
    faulthandler.enable(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 100), all_threads=False)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return fds


def _end_with_parent(parent: int) -> None:
    """Make Linux end this process when its engine ends, and ignore Ctrl-C, which would end this process earlier."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the engine that started this process is gone")
