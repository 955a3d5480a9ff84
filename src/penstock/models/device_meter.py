"""What loading a model takes of the GPUs' memory."""

import os
from typing import NamedTuple

from penstock.engines.hosting.usage import descendants
from penstock.engines.torch.reserved import reserved_bytes
from penstock.telemetry.devices import Gpus, NvidiaGpu


class _InUse(NamedTuple):
    own: int | None  # by this process and those that it started; None: the driver does not know them
    torch: int
    whole: int  # by whomever


class DeviceMeter:
    """By what this process and those that it started have there. Where the driver does not know them, as in most
    containers, by what PyTorch has; else by what the whole device has: then others that load meanwhile are in it."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._before = {gpu.uuid: self._read(gpu) for gpu in gpus.visible}

    def taken_bytes(self, device: str) -> int:
        """Since this was made."""
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
