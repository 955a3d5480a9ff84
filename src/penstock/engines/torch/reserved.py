"""What PyTorch has of a GPU's memory in this process, without importing it."""

import sys
from contextlib import suppress


def reserved_bytes(device: str) -> int | None:
    """With what it keeps for the next batch; without what CUDA itself takes. None: it is not in use here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_reserved(int(device.partition(":")[2] or 0)))


def give_back() -> None:
    """What it keeps for the next batch. Waits for what runs: not for the event loop."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # of a CUDA that is lost
            torch.cuda.empty_cache()
