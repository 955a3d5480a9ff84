"""How much memory a process of a Python model may have: as model.yaml says, or by what the machine has."""

import errno
import os
import re
import resource
from typing import Literal

from penstock.telemetry.control_groups import control_groups

MIB = 1024 * 1024
LEAST_AUTO_BYTES = 128 * MIB  # the process itself takes 50
HEADROOM_BYTES = 32 * MIB  # what telling of a MemoryError may take beyond the limit
_SAYS_NO_MEMORY = re.compile(
    r"MemoryError|bad.?alloc|(can.?t|cannot|unable to|failed to) allocate|not enough memory|can't start new thread",
    re.I,
)


def limit_bytes(memory_mb: int | Literal["auto", "none"], instances: int) -> int | None:
    """What one instance's process may have; None: as much as it likes."""
    if memory_mb == "none":
        return None
    if memory_mb != "auto":
        return memory_mb * MIB
    # What leaks does so in each instance, as requests are spread over them: together they may have half.
    return max(LEAST_AUTO_BYTES, allowed_bytes() // 2 // instances // MIB * MIB)


def allowed_bytes() -> int:
    """The machine's memory, or what control groups leave of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(group.memory_bytes for group in control_groups() if group.memory_bytes)])


# --- in the model's process


def set_limit(limit: int) -> tuple[int, int]:
    """Private memory that the process asks for beyond it is refused: Python then raises MemoryError where it was.

    RLIMIT_DATA and not RLIMIT_AS, as runtimes reserve many times what they use. Returns what to widen it to.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit + HEADROOM_BYTES
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit, most), most))
    return most, most


def widen_limit(to: tuple[int, int]) -> None:
    """Adds the headroom, once the process is to end. Takes no memory itself."""
    resource.setrlimit(resource.RLIMIT_DATA, to)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, even if a library made another exception of it. A GPU's memory is not meant."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, MemoryError) or (isinstance(at, OSError) and at.errno == errno.ENOMEM):
            return True
        is_library = isinstance(at, RuntimeError) or type(at).__module__.startswith("onnxruntime")
        if is_library and says_no_memory(str(at)):
            return True
        at = at.__cause__ or at.__context__
    return False


def says_no_memory(text: str) -> bool:
    return "cuda" not in text.lower() and _SAYS_NO_MEMORY.search(text) is not None
