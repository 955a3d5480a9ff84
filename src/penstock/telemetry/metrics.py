"""Prometheus metrics. All processes of a server write to one folder, so that any gateway can serve all metrics."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from penstock.core.cluster.answer_counts import AnswerCounts
from penstock.telemetry.prometheus_internals import use_value_class
from penstock.telemetry.shared_values import SharedValue

SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    100,
    300,
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Buckets for generated text: a small model takes milliseconds per token, and with a long prompt the first token may
# take a minute.
FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TOKENS_PER_S = (1, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)
MODEL = ("model", "version")
DEVICE = ("uuid", "gpu")


def share_metrics(folder: Path, process: str) -> None:
    """Write this process's metrics to the folder. `process` must be stable over restarts, so that counters continue."""
    folder.mkdir(parents=True, exist_ok=True)
    use_value_class(SharedValue.share(folder, process))


def forget_gauges(folder: Path, process: str) -> None:
    """Remove the gauges of a process that has ended; its counters stay."""
    multiprocess.mark_process_dead(process, str(folder))


def open_shared_registry(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    return registry


def format_as_text(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def format_as_json(registry: CollectorRegistry) -> dict[str, Any]:
    return {
        metric.name: {
            "type": metric.type,
            "help": metric.documentation,
            "samples": [{"name": s.name, "labels": s.labels, "value": s.value} for s in metric.samples],
        }
        for metric in registry.collect()
    }


def _declare_counter(name: str, help_text: str, *labels: str) -> Counter:
    return cast(Counter, partial(Counter, f"penstock_{name}", help_text, labels))


def _declare_gauge(
    name: str, help_text: str, *labels: str, over_processes: Literal["livesum", "livemax"] = "livesum"
) -> Gauge:
    return cast(Gauge, partial(Gauge, f"penstock_{name}", help_text, labels, multiprocess_mode=over_processes))


def _declare_histogram(name: str, help_text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    return cast(Histogram, partial(Histogram, f"penstock_{name}", help_text, labels, buckets=buckets))


class _Metrics:
    """The metrics of one part of the server. A subclass declares them; an instance creates them for a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        for name, declared in vars(type(self)).items():
            if isinstance(declared, partial):
                setattr(self, name, declared(registry=registry))


class SupervisorMetrics(_Metrics):
    restarts = _declare_counter("restarts", "Restarts of processes, by the reason why they ended", "process", "reason")


class EdgeMetrics(_Metrics):
    """Metrics of Envoy as the edge."""

    open_connections = _declare_gauge("edge_open_connections", "Connections of clients to the edge", "edge")
    open_requests = _declare_gauge("edge_open_requests", "Requests that the edge passes on", "edge")
    memory_bytes = _declare_gauge("edge_memory_bytes", "Memory that the edge has allocated", "edge")
    connections = _declare_counter("edge_connections", "Connections that clients opened to the edge", "edge")
    requests = _declare_counter("edge_requests", "Requests that the edge received", "edge")
    refused = _declare_counter(
        "edge_refused", "Connections and requests that the edge refused or ended, by reason", "edge", "reason"
    )
    gateway_failures = _declare_counter(
        "edge_gateway_failures", "Connections from the edge to gateways that failed", "edge"
    )


class BackgroundMetrics(_Metrics):
    failures = _declare_counter("background_failures", "Failed passes of background loops, by loop", "loop")


class ServingMetrics(_Metrics):
    """A gateway's metrics of requests."""

    requests = _declare_counter("requests", "Requests answered", *MODEL, "protocol", "code")
    request_seconds = _declare_histogram("request_seconds", "Request latency, from arrival to answer", *MODEL)
    admit_seconds = _declare_histogram("admit_seconds", "Time for admission and resolution of a request", *MODEL)
    reply_seconds = _declare_histogram("reply_seconds", "Time from sending a job to a worker until its reply", *MODEL)
    refusals = _declare_counter("refusals", "Requests refused, by reason", "reason")
    key_requests = _declare_counter(
        "key_requests", "Requests with an API key, by the key's name and the outcome", "key", "code"
    )
    key_tokens = _declare_counter(
        "key_tokens", "Tokens of prompts and generated text, by the name of the API key", "key"
    )
    inflight_requests = _declare_gauge("inflight_requests", "Requests that the gateways are processing")
    inflight_bytes = _declare_gauge("inflight_bytes", "Bytes of the requests that the gateways are processing")
    memory_bytes = _declare_gauge("gateway_memory_bytes", "Resident memory of the gateways")
    shadow_requests = _declare_counter("shadow_requests", "Requests copied to a shadow, by outcome", *MODEL, "outcome")
    shadow_seconds = _declare_histogram("shadow_seconds", "Latency of copied requests that succeeded", *MODEL)
    first_token_seconds = _declare_histogram(
        "time_to_first_token_seconds",
        "Time from a request's arrival to the first streamed token, at the endpoint",
        *MODEL,
        buckets=FIRST_TOKEN_SECONDS,
    )
    between_tokens_seconds = _declare_histogram(
        "time_between_tokens_seconds",
        "Time between streamed tokens, at the endpoint",
        *MODEL,
        buckets=TOKEN_SECONDS,
    )


class RouterMetrics(_Metrics):
    retries = _declare_counter("retries", "Jobs sent again, by reason", "reason")
    late_replies = _declare_counter("late_replies", "Replies to jobs that were already finished or cancelled")
    wire_errors = _declare_counter("wire_errors", "Messages that could not be decoded")
    workers_lost = _declare_counter("workers_lost", "Connections to workers lost, by reason", "reason")
    ejections = _declare_counter("ejections", "Workers ejected from a block, and readmitted, by event", "event")
    workers = _declare_gauge("workers", "Workers connected", over_processes="livemax")
    queue = _declare_gauge("queue_jobs", "Jobs in the gateways, by state", "block", "state")


class CacheMetrics(_Metrics):
    """Metrics of the response cache."""

    requests = _declare_counter("cache_requests", "Requests to blocks with a cache, by outcome", *MODEL, "outcome")
    saved_seconds = _declare_counter("cache_saved_seconds", "Model time saved by cache hits", *MODEL)
    bytes = _declare_gauge("cache_bytes", "Bytes in the cache")
    entries = _declare_gauge("cache_entries", "Answers in the cache")
    evictions = _declare_counter("cache_evictions", "Answers removed from the cache, by reason", "reason")
    errors = _declare_counter("cache_errors", "Calls to the cache's store that failed or timed out")


class SessionMetrics(_Metrics):
    open = _declare_gauge("sessions", "Ordered sessions that the gateways own")
    waiting = _declare_gauge("session_waiting", "Requests waiting for an earlier one of their session")
    repeats = _declare_gauge("session_repeats", "Repeated requests answered from the session's record")
    forwarded = _declare_gauge("session_forwarded", "Requests forwarded to the gateway that owns their session")


class LimitMetrics(_Metrics):
    """Metrics of callers' limits at the gateways."""

    refusals = _declare_counter("rate_limited", "Requests refused because of a caller's limit, by limit", "limit")
    away = _declare_gauge("limits_away", "Gateways that cannot reach the shared limits and enforce their share alone")
    errors = _declare_counter("limits_errors", "Requests for which the shared limits did not answer in time")


class SearchMetrics(_Metrics):
    """Metrics of the search for blocks at the gateways."""

    resolutions = _declare_counter("search_resolutions", "Requests with a search query, by outcome", "outcome")
    filter_seconds = _declare_histogram("search_filter_seconds", "Time to apply the filters of a search query")
    policy_failures = _declare_counter("search_policy_failures", "Failures of registered policies", "policy")
    vectors = _declare_gauge("search_vectors", "Texts of blocks that the semantic policy has embedded")


class RequestLogMetrics(_Metrics):
    """Metrics of the request log at the gateways."""

    rows = _declare_counter("request_log_rows", "Rows written to the request log")
    lost = _declare_counter("request_log_lost", "Requests that are missing in the request log, by reason", "reason")
    failures = _declare_counter("request_log_failures", "Failed calls to the request log's store")
    waiting = _declare_gauge("request_log_waiting", "Rows that wait to be written to the request log")


class RolloutMetrics(_Metrics):
    _weight = _declare_gauge("rollout_weight", "Share of requests that the new block gets, in percent", "name")
    _changes = _declare_counter("rollout_changes", "Steps and other changes of rollouts, by kind", "name", "kind")
    _answers = _declare_counter("rollout_answers", "Answers of blocks in active rollouts", "name", "block", "outcome")

    def record_change(self, name: str, kind: str, weight: float) -> None:
        self._changes.labels(name, kind).inc()
        self._weight.labels(name).set(weight)

    def count(self, name: str, blocks: Mapping[str, str], counts: Iterable[AnswerCounts]) -> None:
        """Add the counts of a rollout's blocks. `blocks` maps block ids to their labels."""
        for each in counts:
            block = blocks.get(each.block_id)
            if block is not None and not each.is_control:
                self._answers.labels(name, block, "ok").inc(each.answers)
                self._answers.labels(name, block, "error").inc(sum(each.errors.values()))

    def forget(self, name: str) -> None:
        self._weight.labels(name).set(0)


class GenerationMetrics(_Metrics):
    """A worker's metrics of engines that generate text, streamed or not."""

    first_token_seconds = _declare_histogram(
        "engine_time_to_first_token_seconds",
        "Time from arrival on the worker to the first token",
        *MODEL,
        buckets=FIRST_TOKEN_SECONDS,
    )
    between_tokens_seconds = _declare_histogram(
        "engine_time_between_tokens_seconds", "Time between tokens of a choice", *MODEL, buckets=TOKEN_SECONDS
    )
    request_prompt_tokens = _declare_histogram(
        "request_prompt_tokens", "Tokens in a request's prompt", *MODEL, buckets=TOKENS
    )
    request_generated_tokens = _declare_histogram(
        "request_generated_tokens", "Tokens in a finished choice", *MODEL, buckets=TOKENS
    )
    request_tokens_per_s = _declare_histogram(
        "request_tokens_per_second",
        "Tokens per second of a choice, after its first token",
        *MODEL,
        buckets=TOKENS_PER_S,
    )
    prompt_tokens = _declare_counter("prompt_tokens", "Tokens in prompts", *MODEL)
    cached_tokens = _declare_counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache", *MODEL)
    generated_tokens = _declare_counter("generated_tokens", "Tokens generated", *MODEL)
    finished = _declare_counter("generated_answers", "Finished choices, by the reason why they ended", *MODEL, "finish")
    preemptions = _declare_counter("preemptions", "Sequences preempted because cache blocks ran out", *MODEL)
    steps = _declare_counter("generation_steps", "Steps of the engine", *MODEL)
    generations = _declare_gauge("generations", "Sequences running, requests waiting", *MODEL, "state")
    cache_blocks = _declare_gauge("kv_cache_blocks", "Blocks of the KV cache, used and all", *MODEL, "kind")


class WorkerMetrics(_Metrics):
    queue_seconds = _declare_histogram("queue_seconds", "Time that jobs wait on the worker for a batch", *MODEL)
    batch_seconds = _declare_histogram("batch_seconds", "Time to form a batch: pad and stack", *MODEL)
    compute_seconds = _declare_histogram("compute_seconds", "Time that the engine takes for a batch", *MODEL)
    batch_rows = _declare_histogram("batch_rows", "Rows in a batch", *MODEL, buckets=ROWS)
    batches = _declare_counter("batches", "Batches, by the reason why they were sent", *MODEL, "closed")
    tokens = _declare_counter("tokens", "Tokens computed, by kind", *MODEL, "kind")
    failures = _declare_counter("failures", "Jobs that failed on the worker", *MODEL, "code")
    cancelled = _declare_counter("cancelled", "Jobs cancelled on the worker", *MODEL)
    loads = _declare_counter("loads", "Blocks loaded and unloaded, by event", *MODEL, "event")
    instances = _declare_gauge("instances", "Instances of a block, by state", *MODEL, "state")
    waiting = _declare_gauge("worker_waiting", "Pieces of requests waiting on workers", *MODEL)
    memory_bytes = _declare_gauge(
        "worker_memory_bytes", "Resident memory of a worker and its child processes", "worker"
    )
    device_memory = _declare_gauge(
        "device_memory_bytes", "Memory of a GPU, by kind", *DEVICE, "kind", over_processes="livemax"
    )
    device_busy = _declare_gauge("device_busy", "Utilization of a GPU, 0 to 1", *DEVICE, over_processes="livemax")
    worker_device_memory = _declare_gauge(
        "worker_device_memory_bytes", "GPU memory that a worker uses", "worker", "uuid"
    )
    block_device_memory = _declare_gauge(
        "block_device_memory_bytes", "GPU memory that loading a block took", *MODEL, "uuid"
    )
    generation = cast(GenerationMetrics, partial(GenerationMetrics))
