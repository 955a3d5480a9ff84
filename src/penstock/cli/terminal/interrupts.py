"""Ctrl-C and SIGTERM in commands that start servers: what runs is ended in order, and the exit status says why."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, both are a KeyboardInterrupt: blocks that are open close what they opened."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
