"""The whole cluster as Prometheus metrics: rate, errors and duration of blocks; what workers use."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.core.cluster.model_answers import ModelAnswers
from penstock.core.generation import GenerationStanding
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
    wanted: int = 0  # replicas
    placed: int = 0
    serving: int = 0
    answers: ModelAnswers | None = None  # of all gateways together


@dataclass(slots=True)
class BlockOnWorker:
    block_id: str
    requests: int
    errors: int
    latency_s: float  # the sum
    generation: GenerationStanding | None = None  # of one that generates text


@dataclass(slots=True)
class WorkerFigures:
    worker_id: str
    state: str
    silent_s: float = 0.0
    cpu: float = 0.0
    cpus: float = 0.0  # 0: not known, as below
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    gpu: float | None = None  # share of the time; None: nobody can tell
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
    """Of one look at the cluster: it is read in another thread than the one that looked."""

    def __init__(self, figures: ClusterFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        yield from self._control()
        yield from self._rates()
        yield from self._uses()
        yield from self._shares()
        yield from self._generations()

    def _control(self) -> Iterator[Metric]:
        found = self._figures
        yield GaugeMetricFamily("penstock_cluster_leader", "Whether this manager leads", value=int(found.is_leader))
        yield GaugeMetricFamily("penstock_cluster_epoch", "The reign that is known here", value=found.epoch)
        yield GaugeMetricFamily("penstock_cluster_revision", "Of the desired state", value=found.revision)
        yield GaugeMetricFamily("penstock_cluster_managers", "Managers that are there", value=found.managers)
        yield GaugeMetricFamily("penstock_cluster_gateways", "Gateways that are there", value=found.gateways)
        yield _counted("penstock_cluster_workers", "Workers", (worker.state for worker in found.workers))
        yield _counted("penstock_cluster_blocks", "Blocks", (block.state for block in found.blocks))

    def _rates(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("penstock_cluster_replicas", "Of a block", labels=(*BLOCK, "kind"))
        requests = CounterMetricFamily("penstock_cluster_requests", "Answers of a block", labels=(*BLOCK, "code"))
        seconds = HistogramMetricFamily("penstock_cluster_request_seconds", "From arrival to answer", labels=BLOCK)
        for block in self._figures.blocks:
            labels = (block.block_id, block.model, block.version)
            replicas.add_metric((*labels, "missing"), max(0, block.wanted - block.placed))
            for kind in ("wanted", "placed", "serving"):
                replicas.add_metric((*labels, kind), getattr(block, kind))
            if block.answers is not None:
                for code, count in sorted(block.answers.codes.items()):
                    requests.add_metric((*labels, code), count)
                if block.answers.buckets:
                    buckets = list(zip(BOUNDS, block.answers.buckets, strict=True))
                    seconds.add_metric(labels, buckets, block.answers.seconds)
        yield from (replicas, requests, seconds)

    def _uses(self) -> Iterator[Metric]:
        used = ("worker", "kind")
        cpu = GaugeMetricFamily("penstock_cluster_worker_cpu_cores", "In use, and there", labels=used)
        memory = GaugeMetricFamily("penstock_cluster_worker_memory_bytes", "In use, and there", labels=used)
        gpu = GaugeMetricFamily("penstock_cluster_worker_gpu_busy", "Share of the time", labels=("worker",))
        gpu_memory = GaugeMetricFamily("penstock_cluster_worker_gpu_memory_bytes", "In use, and there", labels=used)
        jobs = GaugeMetricFamily("penstock_cluster_worker_jobs", "Waiting and running", labels=("worker", "state"))
        instances = GaugeMetricFamily("penstock_cluster_worker_instances", "Busy, and there", labels=used)
        silent = GaugeMetricFamily("penstock_cluster_worker_silent_seconds", "Since it was heard", labels=("worker",))
        for worker in self._figures.workers:
            name = worker.worker_id
            _put(cpu, name, ("used", worker.cpu), ("all", worker.cpus))
            _put(memory, name, ("used", worker.memory_bytes), ("all", worker.max_memory_bytes))
            _put(instances, name, ("busy", worker.busy), ("all", worker.instances))
            _put(jobs, name, ("waiting", worker.waiting), ("running", max(0, worker.jobs - worker.waiting)))
            if worker.gpu is not None:
                gpu.add_metric((name,), worker.gpu)
            if worker.max_gpu_memory_bytes:
                _put(gpu_memory, name, ("used", worker.gpu_memory_bytes or 0), ("all", worker.max_gpu_memory_bytes))
            silent.add_metric((name,), worker.silent_s)
        yield from (cpu, memory, gpu, gpu_memory, jobs, instances, silent)

    def _shares(self) -> Iterator[Metric]:
        """What each worker does of each block."""
        both = ("worker", "block")
        requests = CounterMetricFamily("penstock_cluster_worker_requests", "Run, by outcome", labels=(*both, "outcome"))
        seconds = CounterMetricFamily("penstock_cluster_worker_seconds", "Spent on requests", labels=both)
        for worker in self._figures.workers:
            for block in worker.blocks:
                labels = (worker.worker_id, block.block_id)
                requests.add_metric((*labels, OK), block.requests - block.errors)
                requests.add_metric((*labels, "error"), block.errors)
                seconds.add_metric(labels, block.latency_s)
        yield from (requests, seconds)

    def _generations(self) -> Iterator[Metric]:
        """What each worker's engines that generate text do."""
        both = ("worker", "block")
        name = "penstock_cluster_worker"
        running = GaugeMetricFamily(
            f"{name}_generations", "Running sequences, waiting requests", labels=(*both, "state")
        )
        cache = GaugeMetricFamily(f"{name}_kv_cache_blocks", "In use, and there", labels=(*both, "kind"))
        tokens = CounterMetricFamily(f"{name}_tokens", "Of prompts, and generated", labels=(*both, "kind"))
        preemptions = CounterMetricFamily(f"{name}_preemptions", "Sequences put back", labels=both)
        for worker in self._figures.workers:
            for block in worker.blocks:
                if (told := block.generation) is None:
                    continue
                labels = (worker.worker_id, block.block_id)
                running.add_metric((*labels, "running"), told.running)
                running.add_metric((*labels, "waiting"), told.waiting)
                cache.add_metric((*labels, "used"), told.cache_blocks_used)
                cache.add_metric((*labels, "all"), told.cache_blocks)
                tokens.add_metric((*labels, "prompt"), told.prompt_tokens)
                tokens.add_metric((*labels, "generated"), told.generated_tokens)
                if told.cached_tokens >= 0:
                    tokens.add_metric((*labels, "prefix_hit"), told.cached_tokens)
                preemptions.add_metric(labels, told.preemptions)
        yield from (running, cache, tokens, preemptions)


def _counted(name: str, what: str, states: Iterable[str]) -> Metric:
    family = GaugeMetricFamily(name, f"{what}, by state", labels=("state",))
    for state, count in sorted(Counter(states).items()):
        family.add_metric((state,), count)
    return family


def _put(family: GaugeMetricFamily, worker: str, *values: tuple[str, float]) -> None:
    for kind, value in values:
        family.add_metric((worker, kind), value)
