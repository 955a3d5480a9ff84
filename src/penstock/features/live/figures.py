"""Computes the live view from two snapshots of a server's metrics: the work between the snapshots, and its phases."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from penstock.core.cluster.devices import DeviceStatus
from penstock.features.live.live_view import (
    Batches,
    BlockInfo,
    BlockOnDevice,
    EventCount,
    Generating,
    InstanceUse,
    Latency,
    LiveBlock,
    LiveDevice,
    LiveView,
    LiveWorker,
    Now,
    Rates,
    ServerInfo,
    Troubles,
    Work,
    WorkerInfo,
)
from penstock.telemetry.snapshot import Labels, ProcessFigures, Series, Snapshot

PHASES = ("admit", "queue", "batch", "compute", "reply")
CLOSED = ("rows", "tokens", "padding", "empty", "delay")


def compare(before: Snapshot, after: Snapshot, seconds: float, at: float, info: ServerInfo) -> LiveView:
    """Compare two snapshots that are `seconds` apart; `at` is the Unix time of `after`."""
    increases = {process: _compute_increases(before.get(process), figures) for process, figures in after.items()}
    counts = _Figures(increases.values())
    totals = _Figures(figures.counts for figures in after.values())
    gauges = _Figures(figures.gauges for figures in after.values())
    known = {worker.id: worker for worker in info.workers}
    names = known.keys() | {name for name in after if _is_worker(after[name])}
    nothing = ProcessFigures()
    return LiveView(
        at=round(at, 3),
        seconds=round(seconds, 3),
        server=info.server,
        version=info.version,
        ready=info.ready,
        draining=info.draining,
        work=_compute_work(counts, seconds),
        now=_compute_current_load(gauges),
        troubles=_compute_troubles(counts, totals),
        generating=_compute_generating(counts, totals, gauges, seconds),
        requests_by_model=_compute_rates(counts.sum_by_label("model", "penstock_requests_total"), seconds),
        blocks=[_compute_block(block, counts, totals, gauges, seconds) for block in info.blocks],
        workers=[
            _compute_worker(name, known.get(name), increases.get(name, {}), after.get(name, nothing).gauges, seconds)
            for name in sorted(names)
        ],
        devices=[_compute_device(device, info.blocks, increases) for device in info.devices],
    )


class _Figures:
    """Sums the metrics of several processes, in total or by a label."""

    def __init__(self, processes: Iterable[Mapping[Series, float]]) -> None:
        self._by_name: dict[str, list[tuple[Labels, float]]] = {}
        for figures in processes:
            for (name, labels), value in figures.items():
                self._by_name.setdefault(name, []).append((labels, value))

    def select(self, *pairs: tuple[str, str]) -> "_Figures":
        """Return only the metrics that have all these pairs of a label and its value."""
        wanted, found = frozenset(pairs), _Figures([])
        for name, every in self._by_name.items():
            found._by_name[name] = [each for each in every if wanted <= each[0]]
        return found

    def sum_total(self, name: str) -> float:
        return sum(value for _, value in self._by_name.get(name, ()))

    def sum_by_label(self, label: str, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for labels, value in self._by_name.get(name, ()):
            for key, text in labels:
                if key == label:
                    found[text] = found.get(text, 0.0) + value
        return found


def _compute_increases(before: ProcessFigures | None, after: ProcessFigures) -> Mapping[Series, float]:
    """Return the increase of each counter. If any counter fell, the process restarted, and all its counts are new."""
    old = before.counts if before is not None else {}
    if any(after.counts.get(series, value) < value for series, value in old.items()):
        old = {}
    return {series: value - old.get(series, 0.0) for series, value in after.counts.items()}


def _compute_work(counts: _Figures, seconds: float) -> Work:
    by_code = counts.sum_by_label("code", "penstock_requests_total")
    return Work(
        requests_per_s=_compute_rate(sum(by_code.values()), seconds),
        by_code=_compute_rates(by_code, seconds),
        latency=_compute_latency(counts, "request"),
        phases={phase: _compute_latency(counts, phase) for phase in PHASES},
        batches=_compute_batches(counts, seconds),
    )


def _compute_latency(counts: _Figures, what: str) -> Latency:
    name = f"penstock_{what}_seconds"
    buckets = sorted((float(le), count) for le, count in counts.sum_by_label("le", f"{name}_bucket").items())
    count = sum(each for _, each in buckets)
    if not count:
        return Latency(0, None, None, None, None)
    mean_s = counts.sum_total(f"{name}_sum") / count
    # By Markov's inequality, a percentile is at most mean / (1 - share). In the first bucket, which is wide, this is
    # less than the bucket's own bound.
    p50, p95, p99 = (min(compute_percentile(buckets, share), mean_s / (1 - share)) for share in (0.50, 0.95, 0.99))
    return Latency(round(count), *(round(1000 * each, 3) for each in (mean_s, p50, p95, p99)))


def compute_percentile(buckets: list[tuple[float, float]], share: float) -> float:
    """Return a percentile from (upper bound, count) of each bucket, in rising order, by linear interpolation.

    A percentile beyond the last finite bound is reported as that bound.
    """
    wanted = share * sum(count for _, count in buckets)
    below, seen = 0.0, 0.0
    for bound, count in buckets:
        if bound == float("inf"):
            break
        if count and seen + count >= wanted:
            return below + (bound - below) * (wanted - seen) / count
        below, seen = bound, seen + count
    return below


def _compute_batches(counts: _Figures, seconds: float) -> Batches:
    closed = dict.fromkeys(CLOSED, 0.0) | counts.sum_by_label("closed", "penstock_batches_total")
    batches = sum(closed.values())
    rows = counts.sum_total("penstock_batch_rows_sum")
    tokens = counts.sum_by_label("kind", "penstock_tokens_total")
    real = tokens.get("real", 0.0)
    return Batches(
        per_s=_compute_rate(batches, seconds),
        rows_per_s=_compute_rate(rows, seconds),
        rows_mean=round(rows / batches, 2) if batches else None,
        padding=round(tokens.get("padded", 0.0) / real, 4) if real else None,
        closed={reason: _compute_rate(count, seconds) for reason, count in closed.items()},
    )


def _compute_current_load(gauges: _Figures) -> Now:
    jobs = gauges.sum_by_label("state", "penstock_queue_jobs")
    return Now(
        inflight_requests=round(gauges.sum_total("penstock_inflight_requests")),
        inflight_bytes=round(gauges.sum_total("penstock_inflight_bytes")),
        waiting=round(jobs.get("waiting", 0)),
        running=round(jobs.get("running", 0)),
        waiting_on_workers=round(gauges.sum_total("penstock_worker_waiting")),
        gateway_memory_bytes=round(gauges.sum_total("penstock_gateway_memory_bytes")),
        edge_connections=round(gauges.sum_by_label("edge", "penstock_edge_open_connections").get("edge", 0)),
    )


def _compute_troubles(counts: _Figures, totals: _Figures) -> Troubles:
    def event_counts(name: str, label: str) -> dict[str, EventCount]:
        new = counts.sum_by_label(label, name)
        every = totals.sum_by_label(label, name)
        return {reason: EventCount(round(new.get(reason, 0)), round(total)) for reason, total in every.items() if total}

    return Troubles(
        refusals=event_counts("penstock_refusals_total", "reason"),
        retries=event_counts("penstock_retries_total", "reason"),
        workers_lost=event_counts("penstock_workers_lost_total", "reason"),
        edge_refused=event_counts("penstock_edge_refused_total", "reason"),
        failures=event_counts("penstock_failures_total", "code"),
    )


def _compute_block(block: BlockInfo, counts: _Figures, totals: _Figures, gauges: _Figures, seconds: float) -> LiveBlock:
    jobs = gauges.select(("block", block.block_id)).sum_by_label("state", "penstock_queue_jobs")
    labels_of_block = (("model", block.model), ("version", block.version))
    counts, totals, gauges = (
        counts.select(*labels_of_block),
        totals.select(*labels_of_block),
        gauges.select(*labels_of_block),
    )
    return LiveBlock(
        **asdict(block),
        waiting=round(jobs.get("waiting", 0)),
        running=round(jobs.get("running", 0)),
        waiting_on_workers=round(gauges.sum_total("penstock_worker_waiting")),
        instances=_compute_instances(counts, gauges, seconds),
        work=_compute_work(counts, seconds),
        generating=_compute_generating(counts, totals, gauges, seconds),
    )


def _compute_generating(counts: _Figures, totals: _Figures, gauges: _Figures, seconds: float) -> Generating | None:
    if not totals.sum_total("penstock_generation_steps_total"):
        return None
    prompt, rate = counts.sum_total("penstock_prompt_tokens_total"), "penstock_request_tokens_per_second"
    ended = sum(counts.sum_by_label("le", f"{rate}_bucket").values())
    states, blocks = (
        gauges.sum_by_label("state", "penstock_generations"),
        gauges.sum_by_label("kind", "penstock_kv_cache_blocks"),
    )
    has_hits = totals.sum_total("penstock_prefix_hit_tokens_total") > 0
    preempted = "penstock_preemptions_total"
    return Generating(
        tokens_per_s=_compute_rate(counts.sum_total("penstock_generated_tokens_total"), seconds),
        prompt_tokens_per_s=_compute_rate(prompt, seconds),
        request_tokens_per_s=round(counts.sum_total(f"{rate}_sum") / ended, 2) if ended else None,
        answers=_compute_rates(counts.sum_by_label("finish", "penstock_generated_answers_total"), seconds),
        first_token=_compute_latency(counts, "time_to_first_token"),
        between_tokens=_compute_latency(counts, "time_between_tokens"),
        engine_first_token=_compute_latency(counts, "engine_time_to_first_token"),
        engine_between_tokens=_compute_latency(counts, "engine_time_between_tokens"),
        prefix_hits=round(counts.sum_total("penstock_prefix_hit_tokens_total") / prompt, 4)
        if has_hits and prompt
        else None,
        running=round(states.get("running", 0)),
        waiting=round(states.get("waiting", 0)),
        cache_blocks_used=round(blocks.get("used", 0)),
        cache_blocks=round(blocks.get("all", 0)),
        preemptions=EventCount(round(counts.sum_total(preempted)), round(totals.sum_total(preempted))),
    )


def _compute_worker(
    name: str,
    info: WorkerInfo | None,
    increases: Mapping[Series, float],
    gauge_values: Mapping[Series, float],
    seconds: float,
) -> LiveWorker:
    counts, gauges = _Figures([increases]), _Figures([gauge_values])
    batches = _compute_batches(counts, seconds)
    tokens_per_s = _compute_rate(counts.sum_total("penstock_generated_tokens_total"), seconds)
    if info is None:
        nothing = InstanceUse(0, 0, None)
        return LiveWorker(name, "gone", None, 0, 0, [], 0, nothing, batches.per_s, batches.rows_per_s, tokens_per_s)
    return LiveWorker(
        id=name,
        state="ready" if info.blocks else "empty",
        pid=info.pid,
        jobs=info.jobs,
        memory_bytes=info.memory_bytes or round(gauges.sum_total("penstock_worker_memory_bytes")),
        blocks=info.blocks,
        waiting=round(gauges.sum_total("penstock_worker_waiting")),
        instances=_compute_instances(counts, gauges, seconds),
        batches_per_s=batches.per_s,
        rows_per_s=batches.rows_per_s,
        tokens_per_s=tokens_per_s,
        devices=info.devices,
    )


def _compute_device(
    device: DeviceStatus, blocks: Iterable[BlockInfo], increases: Mapping[str, Mapping[Series, float]]
) -> LiveDevice:
    """Split a device's busy share among its blocks by their compute times on the workers that use the device."""
    counts = _Figures(increases.get(worker, {}) for worker in device.workers)
    spent_s = {
        block.block_id: counts.select(("model", block.model), ("version", block.version)).sum_total(
            "penstock_compute_seconds_sum"
        )
        for block in blocks
        if block.block_id in device.blocks
    }
    total_s = sum(spent_s.values())

    def busy(block_id: str) -> float | None:
        if device.busy is None or not total_s:
            return None
        return round(device.busy * spent_s.get(block_id, 0.0) / total_s, 4)

    return LiveDevice(
        device.uuid,
        device.name,
        device.memory_bytes,
        device.used_bytes,
        device.busy,
        device.workers,
        [BlockOnDevice(block_id, size_bytes, busy(block_id)) for block_id, size_bytes in device.blocks.items()],
    )


def _compute_instances(counts: _Figures, gauges: _Figures, seconds: float) -> InstanceUse:
    states = gauges.sum_by_label("state", "penstock_instances")
    busy, idle = states.get("busy", 0.0), states.get("idle", 0.0)
    spent_s = sum(counts.sum_total(f"penstock_{phase}_seconds_sum") for phase in ("batch", "compute"))
    share = round(min(1.0, spent_s / seconds / (busy + idle)), 4) if busy + idle and seconds > 0 else None
    return InstanceUse(round(busy), round(idle), share)


def _is_worker(figures: ProcessFigures) -> bool:
    return any(series.name == "penstock_batches_total" for series in figures.counts)


def _compute_rates(counts: Mapping[str, float], seconds: float) -> Rates:
    """Return the rates per second of the counts that are not zero."""
    return {name: _compute_rate(count, seconds) for name, count in sorted(counts.items()) if count}


def _compute_rate(count: float, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
