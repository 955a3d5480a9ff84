"""The first process of a container is the parent of all whose own has ended: their ends are its to take note of."""

import asyncio
import os
from contextlib import AsyncExitStack, suppress

import psutil
import structlog

log = structlog.get_logger()
LOOK_S = 0.5


class Orphans:
    """Who started one here takes note of its end at once: one that is there still at the next look is nobody's."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def look(self) -> None:
        ended = _ended_children()
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def adopt_orphans(stack: AsyncExitStack) -> None:
    """Until the stack is left, where this is the first process."""
    if os.getpid() == 1:
        looking = asyncio.create_task(_look_forever(Orphans()), name="orphans")
        stack.callback(looking.cancel)


async def _look_forever(orphans: Orphans) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            orphans.look()
        except Exception:
            log.exception("bug", where="orphans")


def _ended_children() -> set[int]:
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:  # there is none
        return set()
    return {child.pid for child in psutil.Process().children() if _has_ended(child)}


def _has_ended(child: psutil.Process) -> bool:
    try:
        return bool(child.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
