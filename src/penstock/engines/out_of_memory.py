"""Recognizes the out-of-memory errors of PyTorch, ONNX Runtime and TensorRT; converts them to DeviceOutOfMemory."""

import re

from penstock.core.error_text import show_size
from penstock.core.errors import DeviceOutOfMemory

ADVICE = "lower batching.max_rows or batching.max_tokens, or send less at a time"
# The texts of PyTorch, ONNX Runtime, TensorRT and CUDA's libraries, which have no common error type.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|failed to allocate memory|OutOfMemory|MemoryAllocation"
    r"|STATUS_ALLOC_FAILED|bad_alloc|insufficient (device |gpu )?memory",
    re.IGNORECASE,
)
_REQUESTED = re.compile(
    r"(?:tried to allocate|requested buffer of size|requested size of) +([0-9.]+)\s*([KMGT]i?B)?", re.I
)
_FREE = re.compile(r"of which ([0-9.]+)\s*([KMGT]i?B) is free", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def as_out_of_memory(error: str | BaseException, device: str) -> DeviceOutOfMemory | None:
    """Return the DeviceOutOfMemory to raise instead of `error`, or None if `error` has another cause."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if not _OUT_OF_MEMORY.search(text):
        return None
    asked, free = (_parse_size(pattern.search(text)) for pattern in (_REQUESTED, _FREE))
    amounts = [f"{show_size(asked)} more were requested"] if asked else []
    amounts += [f"{show_size(free)} were free"] if free is not None else []
    known = f" ({', '.join(amounts)})" if amounts else ""
    fields = {"needed_bytes": asked, "free_bytes": free}
    known_fields = {name: str(size) for name, size in fields.items() if size is not None}
    return DeviceOutOfMemory(f"{device} is out of memory{known}: {ADVICE}", device=device, **known_fields)


def _parse_size(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    return int(float(match[1].rstrip(".")) * _UNITS[(match[2] or "")[:1].upper()])
