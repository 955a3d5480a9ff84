"""Measures the GPU memory that a loaded model takes."""

import os
from typing import NamedTuple

from penstock.engines.hosting.process_usage import descendants
from penstock.engines.torch.reserved import reserved_bytes
from penstock.telemetry.gpus import Gpus, NvidiaGpu


class _InUse(NamedTuple):
    own: int | None  # by this process and its children; None if the driver does not know it
    torch: int  # by PyTorch in this process
    whole: int  # by all processes


class DeviceMeter:
    """Measures the GPU memory that this process and its children take.

    In most containers, the driver cannot list processes. Then PyTorch's memory is measured, or, without PyTorch, the
    memory of the whole device, including the memory of other processes that load at the same time.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._before = {gpu.uuid: self._read(gpu) for gpu in gpus.visible}

    def taken_bytes(self, device: str) -> int:
        """Return the bytes that this process has taken on the device since the meter was created."""
        gpu = self._gpus.find(device)
        if gpu is None:
            return 0
        before, after = self._before[gpu.uuid], self._read(gpu)
        if after.own is not None:
            return max(0, after.own - (before.own or 0))
        return max(0, after.torch - before.torch) or max(0, after.whole - before.whole)

    def _read(self, gpu: NvidiaGpu) -> _InUse:
        reading = self._gpus.read(gpu)
        if reading is None:
            return _InUse(None, 0, 0)
        own = reading.bytes_of({os.getpid(), *descendants(os.getpid())})
        return _InUse(own, reserved_bytes(gpu.device) or 0, reading.used_bytes)
