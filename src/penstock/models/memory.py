"""What this process has of the machine's memory, and giving back what was freed."""

import ctypes
from contextlib import suppress

import psutil

# The C library keeps what was freed for itself unless it is asked; not all have this.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def family_bytes() -> int:
    """Memory of this process and of those that models run in. Looks at all processes: not for the event loop."""
    this = psutil.Process()
    total = int(this.memory_info().rss)
    for child in this.children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def trim() -> None:
    """Gives what was freed back to the system. Takes some milliseconds: not for the event loop."""
    if _TRIM is not None:
        _TRIM(0)
