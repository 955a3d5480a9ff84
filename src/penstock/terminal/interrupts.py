"""Ctrl-C and SIGTERM in commands that start servers: stop the servers, then exit with status 130."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """On SIGINT or SIGTERM, raise KeyboardInterrupt in the `with` block, so that context managers clean up."""

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
