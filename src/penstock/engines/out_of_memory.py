"""How runtimes say that a device's memory has run out, and what callers are told of it."""

import re

from penstock.core.error_text import show_size
from penstock.core.errors import DeviceOutOfMemory

ADVICE = "lower batching.max_rows or batching.max_tokens, or send less at a time"
# Of PyTorch, ONNX Runtime, TensorRT and CUDA's libraries. None has an error of its own that the others know.
_SAYS_SO = re.compile(
    r"out of memory|can't allocate memory|failed to allocate memory|OutOfMemory|MemoryAllocation"
    r"|STATUS_ALLOC_FAILED|bad_alloc|insufficient (device |gpu )?memory",
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:tried to allocate|requested buffer of size|requested size of) +([0-9.]+)\s*([KMGT]i?B)?", re.I)
_FREE = re.compile(r"of which ([0-9.]+)\s*([KMGT]i?B) is free", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(said: str | BaseException, device: str) -> DeviceOutOfMemory | None:
    """What the runtime's words mean; None: something else went wrong."""
    text = said if isinstance(said, str) else f"{type(said).__name__}: {said}"
    if not _SAYS_SO.search(text):
        return None
    asked, free = (_bytes(pattern.search(text)) for pattern in (_ASKED, _FREE))
    amounts = [f"{show_size(asked)} more were asked for"] if asked else []
    amounts += [f"{show_size(free)} were free"] if free is not None else []
    known = f" ({', '.join(amounts)})" if amounts else ""
    fields = {"needed_bytes": asked, "free_bytes": free}
    told = {name: str(size) for name, size in fields.items() if size is not None}
    return DeviceOutOfMemory(f"{device} is out of memory{known}: {ADVICE}", device=device, **told)


def _bytes(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    return int(float(found[1].rstrip(".")) * _UNITS[(found[2] or "")[:1].upper()])
