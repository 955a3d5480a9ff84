"""Reads and frees the GPU memory that PyTorch reserves in this process, without importing PyTorch."""

import sys
from contextlib import suppress


def reserved_bytes(device: str) -> int | None:
    """Return the GPU memory that PyTorch has reserved, cache included; None if PyTorch does not use the GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_reserved(int(device.partition(":")[2] or 0)))


def free_cached_memory() -> None:
    """Free PyTorch's cached memory. This waits for running work, so do not call it on the event loop."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # if CUDA has failed
            torch.cuda.empty_cache()
