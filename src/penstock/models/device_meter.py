"""What loading a model takes of the GPUs' memory."""

import os

from penstock.engines.hosting.usage import descendants
from penstock.telemetry.devices import Gpus, NvidiaGpu


class DeviceMeter:
    """By what this process and those that it started have there; where the driver does not know them, as in most
    containers, by what the whole device has: then others that load meanwhile are in it."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._before = {gpu.uuid: self._read(gpu) for gpu in gpus.visible}

    def taken_bytes(self, device: str) -> int:
        """Since this was made."""
        gpu = self._gpus.find(device)
        if gpu is None:
            return 0
        (own_before, all_before), (own, of_all) = self._before[gpu.uuid], self._read(gpu)
        return max(0, of_all - all_before if own is None else own - (own_before or 0))

    def _read(self, gpu: NvidiaGpu) -> tuple[int | None, int]:
        reading = self._gpus.read(gpu)
        if reading is None:
            return None, 0
        return reading.bytes_of({os.getpid(), *descendants(os.getpid())}), reading.used_bytes
