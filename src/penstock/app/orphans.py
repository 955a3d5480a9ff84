"""Reaps orphaned processes: in a container, process 1 becomes the parent of processes whose own parent has ended."""

import os
from contextlib import AsyncExitStack, suppress

import psutil

from penstock.telemetry.background import BackgroundTasks

CHECK_S = 0.5


class Orphans:
    """Reaps ended child processes that no other code in this process waits for.

    These are the children that had ended at the last check of `reap` and still exist at the next check.
    """

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self) -> None:
        ended = _find_ended_children()
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def adopt_orphans(stack: AsyncExitStack) -> None:
    """Reap orphaned processes until the stack closes, if this is process 1."""
    if os.getpid() == 1:
        tasks = BackgroundTasks("orphans")
        tasks.supervise("orphans", Orphans().reap, every=CHECK_S)
        stack.push_async_callback(tasks.close)


def _find_ended_children() -> set[int]:
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:  # there are no children
        return set()
    return {child.pid for child in psutil.Process().children() if _has_ended(child)}


def _has_ended(child: psutil.Process) -> bool:
    try:
        return bool(child.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
