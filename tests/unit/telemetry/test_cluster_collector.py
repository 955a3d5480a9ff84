"""The cluster's metrics: counts add up, and Prometheus can read the text."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.generation import GenerationState
from penstock.telemetry.cluster_collector import (
    BlockFigures,
    BlockOnWorker,
    ClusterCollector,
    ClusterFigures,
    WorkerFigures,
)
from penstock.telemetry.metrics import SECONDS


def read(figures: ClusterFigures) -> "Read":
    registry = CollectorRegistry()
    registry.register(ClusterCollector(figures))
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return Read({(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples})


class Read:
    """By name and the values of labels, in any order."""

    def __init__(self, samples: dict[tuple[str, frozenset[str]], float]) -> None:
        self._samples = samples

    def __getitem__(self, key: tuple[str, tuple[str, ...]]) -> float:
        return self._samples[key[0], frozenset(key[1])]

    def __contains__(self, key: tuple[str, tuple[str, ...]]) -> bool:
        return (key[0], frozenset(key[1])) in self._samples


def test_blocks_have_rates_errors_and_durations() -> None:
    counts = [0] * SECONDS.index(5) + [2, 8, 10, 10, 10, 10]
    answers = ModelAnswers("m", "1", {"ok": 11, "engine_failed": 3}, counts, 7.5)
    found = read(ClusterFigures(blocks=[BlockFigures("b", "m", "1", "ready", 3, 2, 1, answers)]))
    assert found["penstock_cluster_requests_total", ("b", "m", "1", "ok")] == 11
    assert found["penstock_cluster_requests_total", ("b", "m", "1", "engine_failed")] == 3
    assert found["penstock_cluster_request_seconds_count", ("b", "m", "1")] == 10
    assert found["penstock_cluster_request_seconds_sum", ("b", "m", "1")] == 7.5
    assert found["penstock_cluster_request_seconds_bucket", ("b", "m", "1", "10.0")] == 8
    kinds = {
        kind: found["penstock_cluster_replicas", ("b", "m", "1", kind)] for kind in ("wanted", "serving", "missing")
    }
    assert kinds == {"wanted": 3, "serving": 1, "missing": 1}


def test_workers_have_utilization_and_saturation() -> None:
    with_gpu = WorkerFigures(
        "w", "alive", 0.1, 1.5, 8, 10, 100, 0.7, 5, 50, jobs=7, waiting=4, busy=2, instances=3,
        blocks=[BlockOnWorker("b", 20, 5, 1.25)],
    )  # fmt: skip
    found = read(ClusterFigures(workers=[with_gpu, WorkerFigures("v", "offline")]))
    assert found["penstock_cluster_workers", ("alive",)] == found["penstock_cluster_workers", ("offline",)] == 1
    assert found["penstock_cluster_worker_cpu_cores", ("w", "all")] == 8
    assert found["penstock_cluster_worker_gpu_busy", ("w",)] == 0.7
    assert ("penstock_cluster_worker_gpu_busy", ("v",)) not in found
    assert found["penstock_cluster_worker_jobs", ("w", "waiting")] == 4
    assert found["penstock_cluster_worker_jobs", ("w", "running")] == 3
    assert found["penstock_cluster_worker_instances", ("w", "busy")] == 2
    assert found["penstock_cluster_worker_requests_total", ("w", "b", "ok")] == 15
    assert found["penstock_cluster_worker_seconds_total", ("w", "b")] == 1.25


def test_generating_engines_have_figures() -> None:
    told = BlockOnWorker("b", 20, 5, 1.25, GenerationState(2, 3, 100, 40, 7, 50, -1, 60, 4))
    found = read(
        ClusterFigures(workers=[WorkerFigures("w", "alive", blocks=[told, BlockOnWorker("other", 1, 0, 1.0)])])
    )
    assert found["penstock_cluster_worker_generations", ("w", "b", "running")] == 2
    assert found["penstock_cluster_worker_generations", ("w", "b", "waiting")] == 3
    assert found["penstock_cluster_worker_kv_cache_blocks", ("w", "b", "used")] == 40
    assert found["penstock_cluster_worker_tokens_total", ("w", "b", "generated")] == 60
    assert ("penstock_cluster_worker_tokens_total", ("w", "b", "prefix_hit")) not in found  # not reported
    assert found["penstock_cluster_worker_preemptions_total", ("w", "b")] == 4
    assert ("penstock_cluster_worker_generations", ("w", "other", "running")) not in found


def test_the_control_plane_has_figures() -> None:
    found = read(ClusterFigures(True, 7, 99, 2, 3, [BlockFigures("b", "m", "1", "ready")]))
    names = ("leader", "epoch", "revision", "gateways", "managers")
    assert [found[f"penstock_cluster_{name}", ()] for name in names] == [1, 7, 99, 2, 3]
    assert found["penstock_cluster_blocks", ("ready",)] == 1
