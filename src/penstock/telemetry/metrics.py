"""Prometheus metrics. Every process of one server writes to one folder, so that any gateway can show them all."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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


class _Metrics:
    """Makes the metrics of one part of the server, each with its name, what it is and its labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"penstock_{name}", what, labels, registry=self._registry)

    def _gauge(
        self, name: str, what: str, *labels: str, over_processes: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        return Gauge(f"penstock_{name}", what, labels, multiprocess_mode=over_processes, registry=self._registry)

    def _histogram(self, name: str, what: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"penstock_{name}", what, labels, buckets=buckets, registry=self._registry)


class SupervisorMetrics(_Metrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.restarts = self._counter("restarts", "Processes started again, by why they ended", "process", "reason")


class ServingMetrics(_Metrics):
    """What the gateway sees of every request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter("requests", "Requests answered", *MODEL, "protocol", "code")
        self.request_seconds = self._histogram("request_seconds", "From arrival to answer", *MODEL)
        self.admit_seconds = self._histogram("admit_seconds", "Admission and resolution", *MODEL)
        self.reply_seconds = self._histogram("reply_seconds", "The way to the worker and back", *MODEL)
        self.refusals = self._counter("refusals", "Requests refused, by reason", "reason")
        self.key_requests = self._counter(
            "key_requests", "Requests of those who have a key, by its name and what came of them", "key", "code"
        )
        self.inflight_requests = self._gauge("inflight_requests", "Requests inside")
        self.inflight_bytes = self._gauge("inflight_bytes", "Bytes of the requests inside")
        self.memory_bytes = self._gauge("gateway_memory_bytes", "Resident memory")
        self.shadow_requests = self._counter(
            "shadow_requests", "Copies of requests, by what came of them", *MODEL, "outcome"
        )
        self.shadow_seconds = self._histogram("shadow_seconds", "Copies that succeeded, from sending to answer", *MODEL)
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "Streamed text, from arrival to the first token at the door",
            *MODEL,
            buckets=FIRST_TOKEN_SECONDS,
        )
        self.between_tokens_seconds = self._histogram(
            "time_between_tokens_seconds",
            "Streamed text, from token to token at the door",
            *MODEL,
            buckets=TOKEN_SECONDS,
        )


class RouterMetrics(_Metrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.retries = self._counter("retries", "Jobs sent again, by reason", "reason")
        self.late_replies = self._counter("late_replies", "Replies that nobody waited for")
        self.wire_errors = self._counter("wire_errors", "Frames that could not be understood")
        self.workers_lost = self._counter("workers_lost", "Workers gone, by reason", "reason")
        self.ejections = self._counter(
            "ejections", "Workers that got no more of a block's requests, and those that do again", "event"
        )
        self.workers = self._gauge("workers", "Workers connected", over_processes="livemax")
        self.queue = self._gauge("queue_jobs", "Jobs in the gateways", "block", "state")


class CacheMetrics(_Metrics):
    """The response cache of the gateways."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter(
            "cache_requests", "Requests to blocks with a cache, by what came of it", *MODEL, "outcome"
        )
        self.saved_seconds = self._counter("cache_saved_seconds", "Time of models that hits did not take", *MODEL)
        self.bytes = self._gauge("cache_bytes", "Bytes kept")
        self.entries = self._gauge("cache_entries", "Answers kept")
        self.evictions = self._counter("cache_evictions", "Answers let go of, by reason", "reason")
        self.errors = self._counter("cache_errors", "Calls of the cache's store that failed or were late")


class SessionMetrics(_Metrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.open = self._gauge("sessions", "Sessions at the gateways")
        self.waiting = self._gauge("session_waiting", "Requests that wait for an earlier one of their session")
        self.repeats = self._gauge("session_repeats", "Requests answered with what was recorded")
        self.forwarded = self._gauge("session_forwarded", "Requests sent to the gateway that owns their session")


class LimitMetrics(_Metrics):
    """Callers' limits at the gateways."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.refusals = self._counter("rate_limited", "Requests beyond their caller's limits, by which", "limit")
        self.away = self._gauge("limits_away", "Gateways whose shared limits are away: each holds to its share")
        self.errors = self._counter("limits_errors", "Requests that the shared limits did not answer for in time")


class RolloutMetrics(_Metrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._weight = self._gauge("rollout_weight", "The new block's share of a name's requests, in percent", "name")
        self._changes = self._counter("rollout_changes", "What rollouts did, by kind", "name", "kind")
        self._answers = self._counter(
            "rollout_answers", "Answers by the blocks of rollouts that go on", "name", "block", "outcome"
        )

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


class WorkerMetrics(_Metrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.queue_seconds = self._histogram("queue_seconds", "Waiting on the worker for a batch", *MODEL)
        self.batch_seconds = self._histogram("batch_seconds", "Forming a batch: pad and stack", *MODEL)
        self.compute_seconds = self._histogram("compute_seconds", "The engine on a batch", *MODEL)
        self.batch_rows = self._histogram("batch_rows", "Rows in a batch", *MODEL, buckets=ROWS)
        self.batches = self._counter("batches", "Batches, by why they closed", *MODEL, "closed")
        self.tokens = self._counter("tokens", "Tokens computed", *MODEL, "kind")
        self.failures = self._counter("failures", "Jobs that failed on the worker", *MODEL, "code")
        self.cancelled = self._counter("cancelled", "Jobs cancelled on the worker", *MODEL)
        self.loads = self._counter("loads", "Blocks loaded and unloaded", *MODEL, "event")
        self.instances = self._gauge("instances", "Instances", *MODEL, "state")
        self.waiting = self._gauge("worker_waiting", "Pieces waiting on workers", *MODEL)
        self.memory_bytes = self._gauge("worker_memory_bytes", "Resident memory", "worker")
        self.generation = GenerationMetrics(registry)


class GenerationMetrics(_Metrics):
    """What engines that generate text do on a worker, whether their answers are streamed or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.first_token_seconds = self._histogram(
            "engine_time_to_first_token_seconds",
            "From arrival on the worker to the first token",
            *MODEL,
            buckets=FIRST_TOKEN_SECONDS,
        )
        self.between_tokens_seconds = self._histogram(
            "engine_time_between_tokens_seconds", "From token to token of a choice", *MODEL, buckets=TOKEN_SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens in a request's prompt", *MODEL, buckets=TOKENS
        )
        self.request_generated_tokens = self._histogram(
            "request_generated_tokens", "Tokens in a choice that has ended", *MODEL, buckets=TOKENS
        )
        self.request_tokens_per_s = self._histogram(
            "request_tokens_per_second", "Tokens a second of a choice, after its first", *MODEL, buckets=TOKENS_PER_S
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", *MODEL)
        self.cached_tokens = self._counter("prefix_hit_tokens", "Of those, found in the prefix cache", *MODEL)
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated", *MODEL)
        self.finished = self._counter("generated_answers", "Choices that have ended, by why", *MODEL, "finish")
        self.preemptions = self._counter("preemptions", "Sequences put back for want of cache blocks", *MODEL)
        self.steps = self._counter("generation_steps", "Steps of the engine", *MODEL)
        self.generations = self._gauge("generations", "Sequences that run, requests that wait", *MODEL, "state")
        self.cache_blocks = self._gauge("kv_cache_blocks", "Blocks of the KV cache", *MODEL, "kind")
