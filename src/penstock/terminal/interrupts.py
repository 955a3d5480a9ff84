"""Ctrl-C and SIGTERM in commands that start servers: stop the servers, then exit with status 130."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the `with` block on SIGINT and SIGTERM, so that context managers can clean up."""

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
