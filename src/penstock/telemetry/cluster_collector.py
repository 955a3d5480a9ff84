"""Prometheus metrics of the whole cluster: rate, errors and duration per block, and resource use per worker."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.generation import GenerationState
from penstock.telemetry.metrics import SECONDS

BOUNDS = tuple(floatToGoString(bound) for bound in (*SECONDS, inf))
BLOCK = ("block", "model", "version")
OK = "ok"


@dataclass(slots=True)
class BlockFigures:
    block_id: str
    model: str
    version: str
    state: str
    wanted_replicas: int = 0
    placed_replicas: int = 0
    serving_replicas: int = 0
    answers: ModelAnswers | None = None  # of all gateways together


@dataclass(slots=True)
class BlockOnWorker:
    block_id: str
    requests: int
    errors: int
    latency_s: float  # of all requests together
    generation: GenerationState | None = None  # of a block that generates text


@dataclass(slots=True)
class WorkerFigures:
    worker_id: str
    state: str
    silent_s: float = 0.0
    cpu: float = 0.0
    cpus: float = 0.0  # 0: unknown; 0 also means unknown in `max_memory_bytes` and `max_gpu_memory_bytes`
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    gpu: float | None = None  # utilization from 0 to 1; None: unknown
    gpu_memory_bytes: int | None = None
    max_gpu_memory_bytes: int = 0
    jobs: int = 0
    waiting: int = 0
    busy: int = 0
    instances: int = 0
    blocks: list[BlockOnWorker] = field(default_factory=list)


@dataclass(slots=True)
class ClusterFigures:
    is_leader: bool = False
    epoch: int = 0
    revision: int = 0
    gateways: int = 0
    managers: int = 0
    blocks: list[BlockFigures] = field(default_factory=list)
    workers: list[WorkerFigures] = field(default_factory=list)


class ClusterCollector(Collector):
    """Metrics of a snapshot of the cluster, which another thread may read."""

    def __init__(self, figures: ClusterFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_control_metrics()
        yield from self._collect_request_metrics()
        yield from self._collect_worker_metrics()
        yield from self._collect_share_metrics()
        yield from self._collect_generation_metrics()

    def _collect_control_metrics(self) -> Iterator[Metric]:
        found = self._figures
        is_leader = int(found.is_leader)
        yield GaugeMetricFamily("penstock_cluster_leader", "1 if this manager is the leader, else 0", value=is_leader)
        yield GaugeMetricFamily("penstock_cluster_epoch", "Latest term that this manager knows", value=found.epoch)
        yield GaugeMetricFamily("penstock_cluster_revision", "Revision of the desired state", value=found.revision)
        yield GaugeMetricFamily("penstock_cluster_managers", "Managers in the cluster", value=found.managers)
        yield GaugeMetricFamily("penstock_cluster_gateways", "Gateways in the cluster", value=found.gateways)
        yield _count_by_state("penstock_cluster_workers", "Workers", (worker.state for worker in found.workers))
        yield _count_by_state("penstock_cluster_blocks", "Blocks", (block.state for block in found.blocks))

    def _collect_request_metrics(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("penstock_cluster_replicas", "Replicas of a block", labels=(*BLOCK, "kind"))
        requests = CounterMetricFamily("penstock_cluster_requests", "Requests to a block", labels=(*BLOCK, "code"))
        seconds = HistogramMetricFamily("penstock_cluster_request_seconds", "Request latency", labels=BLOCK)
        for block in self._figures.blocks:
            labels = (block.block_id, block.model, block.version)
            replicas.add_metric((*labels, "missing"), max(0, block.wanted_replicas - block.placed_replicas))
            for kind in ("wanted", "placed", "serving"):
                replicas.add_metric((*labels, kind), getattr(block, f"{kind}_replicas"))
            if block.answers is not None:
                for code, count in sorted(block.answers.codes.items()):
                    requests.add_metric((*labels, code), count)
                if block.answers.buckets:
                    buckets = list(zip(BOUNDS, block.answers.buckets, strict=True))
                    seconds.add_metric(labels, buckets, block.answers.seconds)
        yield from (replicas, requests, seconds)

    def _collect_worker_metrics(self) -> Iterator[Metric]:
        used = ("worker", "kind")
        cpu = GaugeMetricFamily("penstock_cluster_worker_cpu_cores", "CPU cores, used and all", labels=used)
        memory = GaugeMetricFamily("penstock_cluster_worker_memory_bytes", "Memory, used and all", labels=used)
        gpu = GaugeMetricFamily("penstock_cluster_worker_gpu_busy", "GPU utilization, 0 to 1", labels=("worker",))
        gpu_memory = GaugeMetricFamily(
            "penstock_cluster_worker_gpu_memory_bytes", "GPU memory, used and all", labels=used
        )
        jobs = GaugeMetricFamily("penstock_cluster_worker_jobs", "Jobs, by state", labels=("worker", "state"))
        instances = GaugeMetricFamily("penstock_cluster_worker_instances", "Busy, and there", labels=used)
        silent = GaugeMetricFamily(
            "penstock_cluster_worker_silent_seconds", "Time since the last heartbeat", labels=("worker",)
        )
        for worker in self._figures.workers:
            name = worker.worker_id
            _add_values(cpu, name, ("used", worker.cpu), ("all", worker.cpus))
            _add_values(memory, name, ("used", worker.memory_bytes), ("all", worker.max_memory_bytes))
            _add_values(instances, name, ("busy", worker.busy), ("all", worker.instances))
            _add_values(jobs, name, ("waiting", worker.waiting), ("running", max(0, worker.jobs - worker.waiting)))
            if worker.gpu is not None:
                gpu.add_metric((name,), worker.gpu)
            if worker.max_gpu_memory_bytes:
                _add_values(
                    gpu_memory, name, ("used", worker.gpu_memory_bytes or 0), ("all", worker.max_gpu_memory_bytes)
                )
            silent.add_metric((name,), worker.silent_s)
        yield from (cpu, memory, gpu, gpu_memory, jobs, instances, silent)

    def _collect_share_metrics(self) -> Iterator[Metric]:
        """Yield the requests of each block on each worker."""
        both = ("worker", "block")
        requests = CounterMetricFamily(
            "penstock_cluster_worker_requests", "Requests run, by outcome", labels=(*both, "outcome")
        )
        seconds = CounterMetricFamily("penstock_cluster_worker_seconds", "Time spent on requests", labels=both)
        for worker in self._figures.workers:
            for block in worker.blocks:
                labels = (worker.worker_id, block.block_id)
                requests.add_metric((*labels, OK), block.requests - block.errors)
                requests.add_metric((*labels, "error"), block.errors)
                seconds.add_metric(labels, block.latency_s)
        yield from (requests, seconds)

    def _collect_generation_metrics(self) -> Iterator[Metric]:
        both = ("worker", "block")
        name = "penstock_cluster_worker"
        running = GaugeMetricFamily(
            f"{name}_generations", "Sequences running, requests waiting", labels=(*both, "state")
        )
        cache = GaugeMetricFamily(f"{name}_kv_cache_blocks", "KV cache blocks, used and all", labels=(*both, "kind"))
        tokens = CounterMetricFamily(f"{name}_tokens", "Tokens, by kind", labels=(*both, "kind"))
        preemptions = CounterMetricFamily(f"{name}_preemptions", "Sequences preempted", labels=both)
        for worker in self._figures.workers:
            for block in worker.blocks:
                if (generation := block.generation) is None:
                    continue
                labels = (worker.worker_id, block.block_id)
                running.add_metric((*labels, "running"), generation.running)
                running.add_metric((*labels, "waiting"), generation.waiting)
                cache.add_metric((*labels, "used"), generation.cache_blocks_used)
                cache.add_metric((*labels, "all"), generation.cache_blocks)
                tokens.add_metric((*labels, "prompt"), generation.prompt_tokens)
                tokens.add_metric((*labels, "generated"), generation.generated_tokens)
                if generation.cached_tokens >= 0:
                    tokens.add_metric((*labels, "prefix_hit"), generation.cached_tokens)
                preemptions.add_metric(labels, generation.preemptions)
        yield from (running, cache, tokens, preemptions)


def _count_by_state(name: str, help_text: str, states: Iterable[str]) -> Metric:
    family = GaugeMetricFamily(name, f"{help_text}, by state", labels=("state",))
    for state, count in sorted(Counter(states).items()):
        family.add_metric((state,), count)
    return family


def _add_values(family: GaugeMetricFamily, worker: str, *values: tuple[str, float]) -> None:
    for kind, value in values:
        family.add_metric((worker, kind), value)
