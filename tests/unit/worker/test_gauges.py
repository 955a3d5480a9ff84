"""A worker's GPUs in the metrics."""

from prometheus_client import CollectorRegistry

from penstock.core.cluster.devices import WorkerDevice
from penstock.telemetry.metrics import WorkerMetrics
from penstock.worker.gauges import DeviceGauges


def test_devices_and_their_blocks_are_shown_and_what_is_gone_is_not() -> None:
    registry = CollectorRegistry()
    gauges = DeviceGauges(WorkerMetrics(registry), "worker-0")

    def value(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"penstock_{metric}", {"uuid": "GPU-1", **labels})

    gauges.show([WorkerDevice("cuda:0", "GPU-1", "H", 100, 60, 0.5, 30, {"blk-m": 20})], {"blk-m": ("m", "1")})
    assert [value("device_memory_bytes", gpu="H", kind=kind) for kind in ("all", "used")] == [100, 60]
    assert value("device_busy", gpu="H") == 0.5
    assert value("worker_device_memory_bytes", worker="worker-0") == 30
    assert value("block_device_memory_bytes", model="m", version="1") == 20
    gauges.show([WorkerDevice("cuda:0", "GPU-1", "H", 100, 40)], {})
    assert value("block_device_memory_bytes", model="m", version="1") == 0
    assert value("device_memory_bytes", gpu="H", kind="used") == 40
