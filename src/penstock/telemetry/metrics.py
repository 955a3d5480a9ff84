"""Prometheus metrics. Every process of one server writes to one folder, so that any gateway can show them all."""

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
    values,
)

from penstock.core.cluster.answer_counts import AnswerCounts
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
# Of generated text: a small model makes a token in some milliseconds, a long prompt may take a minute before its first.
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
    """Makes this process's metrics part of the folder's. `process` is stable over restarts: counters go on."""
    folder.mkdir(parents=True, exist_ok=True)
    values.ValueClass = SharedValue.share(folder, process)


def forget_gauges(folder: Path, process: str) -> None:
    """A process is gone: its counters stay, its gauges must not."""
    multiprocess.mark_process_dead(process, str(folder))


def shared_registry(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    return registry


def as_text(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def as_json(registry: CollectorRegistry) -> dict[str, Any]:
    return {
        metric.name: {
            "type": metric.type,
            "help": metric.documentation,
            "samples": [{"name": s.name, "labels": s.labels, "value": s.value} for s in metric.samples],
        }
        for metric in registry.collect()
    }


def _counter(name: str, what: str, *labels: str) -> Counter:
    return cast(Counter, partial(Counter, f"penstock_{name}", what, labels))


def _gauge(name: str, what: str, *labels: str, over_processes: Literal["livesum", "livemax"] = "livesum") -> Gauge:
    return cast(Gauge, partial(Gauge, f"penstock_{name}", what, labels, multiprocess_mode=over_processes))


def _histogram(name: str, what: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    return cast(Histogram, partial(Histogram, f"penstock_{name}", what, labels, buckets=buckets))


class _Metrics:
    """Those of one part of the server: declared in its class, each with its name, what it is and its labels, and made
    for a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        for name, declared in vars(type(self)).items():
            if isinstance(declared, partial):
                setattr(self, name, declared(registry=registry))


class SupervisorMetrics(_Metrics):
    restarts = _counter("restarts", "Processes started again, by why they ended", "process", "reason")


class ServingMetrics(_Metrics):
    """What the gateway sees of every request."""

    requests = _counter("requests", "Requests answered", *MODEL, "protocol", "code")
    request_seconds = _histogram("request_seconds", "From arrival to answer", *MODEL)
    admit_seconds = _histogram("admit_seconds", "Admission and resolution", *MODEL)
    reply_seconds = _histogram("reply_seconds", "The way to the worker and back", *MODEL)
    refusals = _counter("refusals", "Requests refused, by reason", "reason")
    key_requests = _counter(
        "key_requests", "Requests of those who have a key, by its name and what came of them", "key", "code"
    )
    key_tokens = _counter(
        "key_tokens", "Tokens of generated text, prompts and answers, of those who have a key, by its name", "key"
    )
    inflight_requests = _gauge("inflight_requests", "Requests inside")
    inflight_bytes = _gauge("inflight_bytes", "Bytes of the requests inside")
    memory_bytes = _gauge("gateway_memory_bytes", "Resident memory")
    shadow_requests = _counter("shadow_requests", "Copies of requests, by what came of them", *MODEL, "outcome")
    shadow_seconds = _histogram("shadow_seconds", "Copies that succeeded, from sending to answer", *MODEL)
    first_token_seconds = _histogram(
        "time_to_first_token_seconds",
        "Streamed text, from arrival to the first token at the door",
        *MODEL,
        buckets=FIRST_TOKEN_SECONDS,
    )
    between_tokens_seconds = _histogram(
        "time_between_tokens_seconds",
        "Streamed text, from token to token at the door",
        *MODEL,
        buckets=TOKEN_SECONDS,
    )


class RouterMetrics(_Metrics):
    retries = _counter("retries", "Jobs sent again, by reason", "reason")
    late_replies = _counter("late_replies", "Replies that nobody waited for")
    wire_errors = _counter("wire_errors", "Frames that could not be understood")
    workers_lost = _counter("workers_lost", "Workers gone, by reason", "reason")
    ejections = _counter(
        "ejections", "Workers that got no more of a block's requests, and those that do again", "event"
    )
    workers = _gauge("workers", "Workers connected", over_processes="livemax")
    queue = _gauge("queue_jobs", "Jobs in the gateways", "block", "state")


class CacheMetrics(_Metrics):
    """The response cache of the gateways."""

    requests = _counter("cache_requests", "Requests to blocks with a cache, by what came of it", *MODEL, "outcome")
    saved_seconds = _counter("cache_saved_seconds", "Time of models that hits did not take", *MODEL)
    bytes = _gauge("cache_bytes", "Bytes kept")
    entries = _gauge("cache_entries", "Answers kept")
    evictions = _counter("cache_evictions", "Answers let go of, by reason", "reason")
    errors = _counter("cache_errors", "Calls of the cache's store that failed or were late")


class SessionMetrics(_Metrics):
    open = _gauge("sessions", "Sessions at the gateways")
    waiting = _gauge("session_waiting", "Requests that wait for an earlier one of their session")
    repeats = _gauge("session_repeats", "Requests answered with what was recorded")
    forwarded = _gauge("session_forwarded", "Requests sent to the gateway that owns their session")


class LimitMetrics(_Metrics):
    """Callers' limits at the gateways."""

    refusals = _counter("rate_limited", "Requests beyond their caller's limits, by which", "limit")
    away = _gauge("limits_away", "Gateways whose shared limits are away: each holds to its share")
    errors = _counter("limits_errors", "Requests that the shared limits did not answer for in time")


class RolloutMetrics(_Metrics):
    _weight = _gauge("rollout_weight", "The new block's share of a name's requests, in percent", "name")
    _changes = _counter("rollout_changes", "What rollouts did, by kind", "name", "kind")
    _answers = _counter("rollout_answers", "Answers by the blocks of rollouts that go on", "name", "block", "outcome")

    def changed(self, name: str, kind: str, weight: float) -> None:
        self._changes.labels(name, kind).inc()
        self._weight.labels(name).set(weight)

    def count(self, name: str, blocks: Mapping[str, str], counts: Iterable[AnswerCounts]) -> None:
        """`blocks` are their ids, with what they are called."""
        for each in counts:
            block = blocks.get(each.block_id)
            if block is not None and not each.is_control:
                self._answers.labels(name, block, "ok").inc(each.answers)
                self._answers.labels(name, block, "error").inc(sum(each.errors.values()))

    def forget(self, name: str) -> None:
        self._weight.labels(name).set(0)


class GenerationMetrics(_Metrics):
    """What engines that generate text do on a worker, whether their answers are streamed or not."""

    first_token_seconds = _histogram(
        "engine_time_to_first_token_seconds",
        "From arrival on the worker to the first token",
        *MODEL,
        buckets=FIRST_TOKEN_SECONDS,
    )
    between_tokens_seconds = _histogram(
        "engine_time_between_tokens_seconds", "From token to token of a choice", *MODEL, buckets=TOKEN_SECONDS
    )
    request_prompt_tokens = _histogram("request_prompt_tokens", "Tokens in a request's prompt", *MODEL, buckets=TOKENS)
    request_generated_tokens = _histogram(
        "request_generated_tokens", "Tokens in a choice that has ended", *MODEL, buckets=TOKENS
    )
    request_tokens_per_s = _histogram(
        "request_tokens_per_second", "Tokens a second of a choice, after its first", *MODEL, buckets=TOKENS_PER_S
    )
    prompt_tokens = _counter("prompt_tokens", "Tokens of prompts", *MODEL)
    cached_tokens = _counter("prefix_hit_tokens", "Of those, found in the prefix cache", *MODEL)
    generated_tokens = _counter("generated_tokens", "Tokens generated", *MODEL)
    finished = _counter("generated_answers", "Choices that have ended, by why", *MODEL, "finish")
    preemptions = _counter("preemptions", "Sequences put back for want of cache blocks", *MODEL)
    steps = _counter("generation_steps", "Steps of the engine", *MODEL)
    generations = _gauge("generations", "Sequences that run, requests that wait", *MODEL, "state")
    cache_blocks = _gauge("kv_cache_blocks", "Blocks of the KV cache", *MODEL, "kind")


class WorkerMetrics(_Metrics):
    queue_seconds = _histogram("queue_seconds", "Waiting on the worker for a batch", *MODEL)
    batch_seconds = _histogram("batch_seconds", "Forming a batch: pad and stack", *MODEL)
    compute_seconds = _histogram("compute_seconds", "The engine on a batch", *MODEL)
    batch_rows = _histogram("batch_rows", "Rows in a batch", *MODEL, buckets=ROWS)
    batches = _counter("batches", "Batches, by why they closed", *MODEL, "closed")
    tokens = _counter("tokens", "Tokens computed", *MODEL, "kind")
    failures = _counter("failures", "Jobs that failed on the worker", *MODEL, "code")
    cancelled = _counter("cancelled", "Jobs cancelled on the worker", *MODEL)
    loads = _counter("loads", "Blocks loaded and unloaded", *MODEL, "event")
    instances = _gauge("instances", "Instances", *MODEL, "state")
    waiting = _gauge("worker_waiting", "Pieces waiting on workers", *MODEL)
    memory_bytes = _gauge("worker_memory_bytes", "Resident memory, with the processes that it started", "worker")
    device_memory = _gauge("device_memory_bytes", "Of a GPU", *DEVICE, "kind", over_processes="livemax")
    device_busy = _gauge("device_busy", "Share of the time that a GPU was busy", *DEVICE, over_processes="livemax")
    worker_device_memory = _gauge("worker_device_memory_bytes", "Of a GPU, in use by a worker", "worker", "uuid")
    block_device_memory = _gauge("block_device_memory_bytes", "Of a GPU, taken by loading a block", *MODEL, "uuid")
    generation = cast(GenerationMetrics, partial(GenerationMetrics))
