"""Returns freed memory to the system."""

import ctypes

# glibc keeps freed memory until malloc_trim is called; other C libraries do not have this function.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Return freed memory to the system. Takes milliseconds: do not call this on the event loop."""
    if _malloc_trim is not None:
        _malloc_trim(0)
