"""A worker's GPUs in the shared metrics."""

from collections.abc import Iterable, Mapping

from penstock.core.cluster.devices import WorkerDevice
from penstock.telemetry.metrics import WorkerMetrics

Names = Mapping[str, tuple[str, str]]  # model and version, by block


class DeviceGauges:
    def __init__(self, metrics: WorkerMetrics, worker_id: str) -> None:
        self._metrics = metrics
        self._worker_id = worker_id
        self._shown: set[tuple[str, str, str]] = set()  # of blocks: model, version, uuid

    def show(self, devices: Iterable[WorkerDevice], names: Names) -> None:
        metrics, held = self._metrics, set()
        for device in devices:
            its = (device.uuid, device.name)
            metrics.device_memory.labels(*its, "all").set(device.memory_bytes)
            metrics.device_memory.labels(*its, "used").set(device.used_bytes)
            if device.busy is not None:
                metrics.device_busy.labels(*its).set(device.busy)
            if device.worker_bytes is not None:
                metrics.worker_device_memory.labels(self._worker_id, device.uuid).set(device.worker_bytes)
            for block_id, size_bytes in device.blocks.items():
                labels = (*names.get(block_id, ("", "")), device.uuid)
                metrics.block_device_memory.labels(*labels).set(size_bytes)
                held.add(labels)
        for gone in self._shown - held:
            metrics.block_device_memory.labels(*gone).set(0)
        self._shown = held
