"""Prometheus metrics. Every process of one server writes to one folder, so that any gateway can show them all."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
    values,
)
from prometheus_client.metrics_core import Metric

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
MODEL = ("model", "version")


def share_metrics(folder: Path, process: str) -> None:
    """Makes this process's metrics part of the folder's. `process` is stable over restarts: counters go on."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: process)


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
    return {metric.name: _metric_json(metric) for metric in registry.collect()}


def _metric_json(metric: Metric) -> dict[str, Any]:
    samples: Iterable[Any] = metric.samples
    return {
        "type": metric.type,
        "help": metric.documentation,
        "samples": [{"name": s.name, "labels": s.labels, "value": s.value} for s in samples],
    }


class ServingMetrics:
    """What the gateway sees of every request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "penstock_requests", "Requests answered", (*MODEL, "protocol", "code"), registry=registry
        )
        self.request_seconds = Histogram(
            "penstock_request_seconds", "From arrival to answer", MODEL, buckets=SECONDS, registry=registry
        )
        self.admit_seconds = Histogram(
            "penstock_admit_seconds", "Admission and resolution", MODEL, buckets=SECONDS, registry=registry
        )
        self.reply_seconds = Histogram(
            "penstock_reply_seconds",
            "The way to the worker and back",
            MODEL,
            buckets=SECONDS,
            registry=registry,
        )
        self.refusals = Counter("penstock_refusals", "Requests refused, by reason", ("reason",), registry=registry)
        self.inflight_requests = Gauge(
            "penstock_inflight_requests", "Requests inside", multiprocess_mode="livesum", registry=registry
        )
        self.inflight_bytes = Gauge(
            "penstock_inflight_bytes",
            "Bytes of the requests inside",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.memory_bytes = Gauge(
            "penstock_gateway_memory_bytes", "Resident memory", multiprocess_mode="livesum", registry=registry
        )


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.retries = Counter("penstock_retries", "Jobs sent again, by reason", ("reason",), registry=registry)
        self.late_replies = Counter("penstock_late_replies", "Replies that nobody waited for", registry=registry)
        self.wire_errors = Counter("penstock_wire_errors", "Frames that could not be understood", registry=registry)
        self.workers_lost = Counter("penstock_workers_lost", "Workers gone, by reason", ("reason",), registry=registry)
        self.ejections = Counter(
            "penstock_ejections",
            "Workers that got no more of a block's requests, and those that do again",
            ("event",),
            registry=registry,
        )
        self.workers = Gauge("penstock_workers", "Workers connected", multiprocess_mode="livemax", registry=registry)
        self.queue = Gauge(
            "penstock_queue_jobs",
            "Jobs in the gateways",
            ("block", "state"),
            multiprocess_mode="livesum",
            registry=registry,
        )


class CacheMetrics:
    """The response cache of the gateways."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "penstock_cache_requests",
            "Requests to blocks with a cache, by what came of it",
            (*MODEL, "outcome"),
            registry=registry,
        )
        self.saved_seconds = Counter(
            "penstock_cache_saved_seconds", "Time of models that hits did not take", MODEL, registry=registry
        )
        self.bytes = Gauge("penstock_cache_bytes", "Bytes kept", multiprocess_mode="livesum", registry=registry)
        self.entries = Gauge("penstock_cache_entries", "Answers kept", multiprocess_mode="livesum", registry=registry)
        self.evictions = Counter(
            "penstock_cache_evictions", "Answers let go of, by reason", ("reason",), registry=registry
        )
        self.errors = Counter(
            "penstock_cache_errors", "Calls of the cache's store that failed or were late", registry=registry
        )


class SessionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge(
            "penstock_sessions", "Sessions at the gateways", multiprocess_mode="livesum", registry=registry
        )
        self.waiting = Gauge(
            "penstock_session_waiting",
            "Requests that wait for an earlier one of their session",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.repeats = Gauge(
            "penstock_session_repeats",
            "Requests answered with what was recorded",
            multiprocess_mode="livesum",
            registry=registry,
        )


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue_seconds = Histogram(
            "penstock_queue_seconds",
            "Waiting on the worker for a batch",
            MODEL,
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "penstock_batch_seconds",
            "Forming a batch: pad and stack",
            MODEL,
            buckets=SECONDS,
            registry=registry,
        )
        self.compute_seconds = Histogram(
            "penstock_compute_seconds", "The engine on a batch", MODEL, buckets=SECONDS, registry=registry
        )
        self.batch_rows = Histogram("penstock_batch_rows", "Rows in a batch", MODEL, buckets=ROWS, registry=registry)
        self.batches = Counter("penstock_batches", "Batches, by why they closed", (*MODEL, "closed"), registry=registry)
        self.tokens = Counter("penstock_tokens", "Tokens computed", (*MODEL, "kind"), registry=registry)
        self.failures = Counter(
            "penstock_failures", "Jobs that failed on the worker", (*MODEL, "code"), registry=registry
        )
        self.cancelled = Counter("penstock_cancelled", "Jobs cancelled on the worker", MODEL, registry=registry)
        self.loads = Counter("penstock_loads", "Blocks loaded and unloaded", (*MODEL, "event"), registry=registry)
        self.instances = Gauge(
            "penstock_instances",
            "Instances",
            (*MODEL, "state"),
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.waiting = Gauge(
            "penstock_worker_waiting",
            "Pieces waiting on workers",
            MODEL,
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.memory_bytes = Gauge(
            "penstock_worker_memory_bytes",
            "Resident memory",
            ("worker",),
            multiprocess_mode="livesum",
            registry=registry,
        )
