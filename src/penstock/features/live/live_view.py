"""The data of the live view: one event of `GET /v1/live`, which the page at `/` and `penstock top` show."""

from dataclasses import dataclass, field

from penstock.core.cluster.devices import DeviceStatus, WorkerDevice

Rates = dict[str, float]  # per second, by name


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations in milliseconds, None if none was measured. Percentiles are interpolated in the histogram's buckets."""

    count: int
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches that ran during one interval."""

    per_s: float
    rows_per_s: float
    rows_mean: float | None
    padding: float | None  # padded tokens divided by real ones; None if no tokens were counted
    closed: Rates  # by the reason why a batch was sent


@dataclass(frozen=True, slots=True)
class EventCount:
    """The number of times that an event occurred."""

    count: int  # in the interval
    total: int  # since the server started


@dataclass(frozen=True, slots=True)
class Generating:
    """Text generation during one interval: the generated tokens, and the state of the engines when it ended."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    request_tokens_per_s: float | None  # per answer, after its first token: the mean of the answers that ended
    answers: Rates  # ended answers, by finish reason
    first_token: Latency  # as seen by callers of streamed answers
    between_tokens: Latency
    engine_first_token: Latency  # measured on workers, for all answers
    engine_between_tokens: Latency
    prefix_hits: float | None  # share of prompt tokens; None without prompts, or if no engine reports it
    running: int  # sequences
    waiting: int  # requests
    cache_blocks_used: int
    cache_blocks: int
    preemptions: EventCount


@dataclass(frozen=True, slots=True)
class Work:
    """The work done during one interval, by the whole server or for one block."""

    requests_per_s: float
    by_code: Rates
    latency: Latency
    phases: dict[str, Latency]
    batches: Batches


@dataclass(frozen=True, slots=True)
class Now:
    """The current requests and queues: their state when the interval ended."""

    inflight_requests: int
    inflight_bytes: int
    waiting: int  # in the gateways
    running: int
    waiting_on_workers: int
    gateway_memory_bytes: int
    edge_connections: int  # of clients to the edge, if the server has one


@dataclass(frozen=True, slots=True)
class Troubles:
    """Counts of refusals, retries, lost workers and failures, by reason or error code."""

    refusals: dict[str, EventCount]
    retries: dict[str, EventCount]
    workers_lost: dict[str, EventCount]
    edge_refused: dict[str, EventCount]
    failures: dict[str, EventCount]


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """The instances of a block or a worker, and how busy they are."""

    busy: int
    idle: int
    busy_share: float | None  # share of their time spent on forming and computing batches; None without instances


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block's state in the gateway, without metrics."""

    block_id: str
    model: str
    version: str
    state: str
    reason: str
    max_rows: int | None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A connected worker's state in the gateway, without metrics."""

    id: str
    pid: int
    jobs: int
    memory_bytes: int
    blocks: list[str]
    dormant: list[str]
    zone: str
    devices: list[WorkerDevice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The state of the server in a gateway, without metrics."""

    server: str
    version: str
    ready: bool
    draining: bool
    blocks: list[BlockInfo] = field(default_factory=list)
    workers: list[WorkerInfo] = field(default_factory=list)
    devices: list[DeviceStatus] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LiveBlock(BlockInfo):
    """A block's state and metrics."""

    waiting: int
    running: int
    waiting_on_workers: int
    instances: InstanceUse
    work: Work
    generating: Generating | None = None  # None: the block has not generated text


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker; its state is `ready`, `empty` (connected, but without blocks) or `gone` (no longer connected)."""

    id: str
    state: str
    pid: int | None
    jobs: int
    memory_bytes: int
    blocks: list[str]
    waiting: int
    instances: InstanceUse
    batches_per_s: float
    rows_per_s: float
    tokens_per_s: float = 0.0  # generated tokens
    devices: list[WorkerDevice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockOnDevice:
    """The memory and the time that a block uses on a GPU."""

    block_id: str
    memory_bytes: int  # memory that loading the block needed, on all workers
    busy: float | None  # the block's share of the device's time, by compute time; None if unknown


@dataclass(frozen=True, slots=True)
class LiveDevice:
    """A GPU, and its use by all processes."""

    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    busy: float | None  # share of the time; None if unknown
    workers: list[str]
    blocks: list[BlockOnDevice]


@dataclass(frozen=True, slots=True)
class LiveView:
    """The work of a server during one interval, and the state of the server when the interval ended."""

    at: float  # Unix time of the end of the interval
    seconds: float  # length of the interval
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
    generating: Generating | None = None  # of all blocks; None: no text has been generated
    devices: list[LiveDevice] = field(default_factory=list)
