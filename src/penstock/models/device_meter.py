"""Measures the GPU memory that a loaded model takes."""

import os
from typing import NamedTuple

from penstock.engines.hosting.process_usage import list_descendants
from penstock.engines.torch.reserved import reserved_bytes
from penstock.telemetry.gpus import Gpus, NvidiaGpu


class _MemoryUse(NamedTuple):
    own_bytes: int | None  # by this process and its children; None if the driver does not know it
    torch_bytes: int  # by PyTorch in this process
    device_bytes: int  # by all processes


class DeviceMeter:
    """Measures the GPU memory that this process and its children take.

    In most containers, the driver cannot list processes. Then PyTorch's memory is measured, or, without PyTorch, the
    memory of the whole device, including the memory of other processes that load at the same time.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._before = {gpu.uuid: self._read(gpu) for gpu in gpus.visible}

    def taken_bytes(self, device: str) -> int:
        """Return the GPU memory that this process has taken since this object was created."""
        gpu = self._gpus.find(device)
        if gpu is None:
            return 0
        before, after = self._before[gpu.uuid], self._read(gpu)
        if after.own_bytes is not None:
            return max(0, after.own_bytes - (before.own_bytes or 0))
        return max(0, after.torch_bytes - before.torch_bytes) or max(0, after.device_bytes - before.device_bytes)

    def _read(self, gpu: NvidiaGpu) -> _MemoryUse:
        reading = self._gpus.read(gpu)
        if reading is None:
            return _MemoryUse(None, 0, 0)
        own = reading.sum_process_bytes({os.getpid(), *list_descendants(os.getpid())})
        return _MemoryUse(own, reserved_bytes(gpu.device) or 0, reading.used_bytes)
