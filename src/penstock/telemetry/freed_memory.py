"""Returns freed memory to the system."""

import ctypes

# glibc keeps freed memory until malloc_trim is called; other C libraries do not have this function.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Return freed memory to the system. Takes milliseconds: do not call this on the event loop."""
    if _TRIM is not None:
        _TRIM(0)
