"""The worker's memory: how much it has, and giving back what was freed."""

import ctypes
import gc
from contextlib import suppress

import psutil

# The C library keeps what was freed for itself unless it is asked; not all have this.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def family_bytes() -> int:
    """With the processes that models run in. It goes over all of the machine's: not for the event loop."""
    total = resident_bytes()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def trim() -> None:
    """What was freed goes back to the system. Takes some milliseconds, as `reclaim` does: not for the event loop."""
    if _TRIM is not None:
        _TRIM(0)


def reclaim() -> None:
    """After a model was let go of."""
    gc.collect()
    trim()
