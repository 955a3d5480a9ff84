"""What the live view tells: one event of `GET /v1/live`, drawn by the page at `/` and by `penstock top`."""

from dataclasses import dataclass, field

from penstock.core.cluster.devices import DeviceStanding, WorkerDevice

Rates = dict[str, float]  # each second, by name


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds; none where nothing was timed. Percentiles are interpolated within the histogram's buckets."""

    count: int
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Batches:
    per_s: float
    rows_per_s: float
    rows_mean: float | None
    padding: float | None  # padded tokens over real ones; none where no tokens were counted
    closed: Rates


@dataclass(frozen=True, slots=True)
class Happened:
    count: int  # between the looks
    total: int  # since the server started


@dataclass(frozen=True, slots=True)
class Generating:
    """Text that was generated between the looks, and how its engines stand at the second."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    request_tokens_per_s: float | None  # of an answer, after its first token: the mean of those that ended
    answers: Rates  # that ended, by why
    first_token: Latency  # as callers see it whose answers are streamed
    between_tokens: Latency
    engine_first_token: Latency  # on workers, of all answers
    engine_between_tokens: Latency
    prefix_hits: float | None  # share of the prompts' tokens; none where there were no prompts, or no engine tells
    running: int  # sequences
    waiting: int  # requests
    cache_blocks_used: int
    cache_blocks: int
    preemptions: Happened


@dataclass(frozen=True, slots=True)
class Work:
    """What was done between the looks: by the whole server, or for one block."""

    requests_per_s: float
    by_code: Rates
    latency: Latency
    phases: dict[str, Latency]
    batches: Batches


@dataclass(frozen=True, slots=True)
class Now:
    """What is inside at the second look."""

    inflight_requests: int
    inflight_bytes: int
    waiting: int  # in the gateways
    running: int
    waiting_on_workers: int
    gateway_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Troubles:
    """What went wrong, by reason or code."""

    refusals: dict[str, Happened]
    retries: dict[str, Happened]
    workers_lost: dict[str, Happened]
    failures: dict[str, Happened]


@dataclass(frozen=True, slots=True)
class InstancesAtWork:
    busy: int
    idle: int
    busy_share: float | None  # of their time, spent on forming and computing batches; none where there are none


@dataclass(frozen=True, slots=True)
class BlockStanding:
    """What a gateway knows of a block beside its figures."""

    block_id: str
    model: str
    version: str
    state: str
    reason: str
    max_rows: int | None


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    id: str
    pid: int
    jobs: int
    memory_bytes: int
    blocks: list[str]
    dormant: list[str]
    zone: str
    devices: list[WorkerDevice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Standing:
    server: str
    version: str
    ready: bool
    draining: bool
    blocks: list[BlockStanding] = field(default_factory=list)
    workers: list[WorkerStanding] = field(default_factory=list)
    devices: list[DeviceStanding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LiveBlock(BlockStanding):
    waiting: int
    running: int
    waiting_on_workers: int
    instances: InstancesAtWork
    work: Work
    generating: Generating | None = None  # none: it has not generated text


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """`state` is `ready`, `empty` (connected, holding no block) or `gone` (it was here and is not connected)."""

    id: str
    state: str
    pid: int | None
    jobs: int
    memory_bytes: int
    blocks: list[str]
    waiting: int
    instances: InstancesAtWork
    batches_per_s: float
    rows_per_s: float
    tokens_per_s: float = 0.0  # generated
    devices: list[WorkerDevice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockOnDevice:
    block_id: str
    memory_bytes: int  # what loading it took, on all workers
    busy: float | None  # its part of the device's, by the time that it computed; none where nobody can tell


@dataclass(frozen=True, slots=True)
class LiveDevice:
    """A GPU, whoever uses it."""

    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    busy: float | None  # share of the time; none where nobody can tell
    workers: list[str]
    blocks: list[BlockOnDevice]


@dataclass(frozen=True, slots=True)
class LiveView:
    at: float  # Unix time of the second look
    seconds: float  # between the looks
    server: str
    version: str
    ready: bool
    draining: bool
    work: Work
    now: Now
    troubles: Troubles
    requests_by_model: Rates
    blocks: list[LiveBlock]
    workers: list[LiveWorker]
    generating: Generating | None = None  # of all blocks; none: no text has been generated
    devices: list[LiveDevice] = field(default_factory=list)
