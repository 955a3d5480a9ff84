"""Limits the memory of a Python model's process, to the limit in model.yaml or to a share of the machine's memory."""

import errno
import os
import re
import resource
from typing import Literal

from penstock.telemetry.control_groups import list_control_groups

MIB = 1024 * 1024
LEAST_AUTO_BYTES = 128 * MIB  # the process itself takes 50 MiB
HEADROOM_BYTES = 32 * MIB  # available beyond the limit to report a MemoryError
_NO_MEMORY = re.compile(
    r"MemoryError|bad.?alloc|(can.?t|cannot|unable to|failed to) allocate|not enough memory|can't start new thread",
    re.I,
)


def limit_bytes(memory_mb: int | Literal["auto", "none"], instances: int) -> int | None:
    """Return the memory limit of one instance's process, or None for no limit."""
    if memory_mb == "none":
        return None
    if memory_mb != "auto":
        return memory_mb * MIB
    # A memory leak grows in all instances alike, so together they are limited to half of the memory.
    return max(LEAST_AUTO_BYTES, allowed_bytes() // 2 // instances // MIB * MIB)


def allowed_bytes() -> int:
    """Return the memory that this process may use: the machine's memory, or a lower limit of its control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(group.memory_bytes for group in list_control_groups() if group.memory_bytes)])


# --- in the model's process


def set_limit(limit: int) -> tuple[int, int]:
    """Limit the process's private memory, so that Python raises MemoryError beyond the limit.

    The limit is RLIMIT_DATA and not RLIMIT_AS, because runtimes reserve much more memory than they use. Returns the
    higher limit that `widen_limit` may set later.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit + HEADROOM_BYTES
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit, most), most))
    return most, most


def widen_limit(wide_limit: tuple[int, int]) -> None:
    """Raise the memory limit to `wide_limit`, so that a process without memory can still report an error and end.

    This function allocates no memory.
    """
    resource.setrlimit(resource.RLIMIT_DATA, wide_limit)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error was caused by a lack of main memory (not of a GPU's memory)."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, MemoryError) or (isinstance(at, OSError) and at.errno == errno.ENOMEM):
            return True
        is_library = isinstance(at, RuntimeError) or type(at).__module__.startswith("onnxruntime")
        if is_library and mentions_no_memory(str(at)):
            return True
        at = at.__cause__ or at.__context__
    return False


def mentions_no_memory(text: str) -> bool:
    return "cuda" not in text.lower() and _NO_MEMORY.search(text) is not None
