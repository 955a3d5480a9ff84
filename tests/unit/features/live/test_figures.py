"""The live view computed from two snapshots of the metrics: rates, percentiles, restarts, and idle servers."""

from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from penstock.core.cluster.devices import WorkerDevice, merge_devices
from penstock.features.live.figures import compare, compute_percentile
from penstock.features.live.live_view import BlockInfo, BlockOnDevice, EventCount, Latency, ServerInfo, WorkerInfo
from penstock.telemetry.snapshot import ProcessFigures, Series, SnapshotReader

MINILM = {"model": "minilm", "version": "1"}
SRCNN = {"model": "srcnn", "version": "2"}
STANDING = ServerInfo(
    "penstock",
    "9",
    ready=True,
    draining=False,
    blocks=[
        BlockInfo("blk-m", "minilm", "1", "ready", "", 32),
        BlockInfo("blk-s", "srcnn", "2", "failed", "no file", None),
    ],
    workers=[
        WorkerInfo("worker-0", 7, 3, 2**20, ["blk-m"], [], ""),
        WorkerInfo("worker-2", 8, 0, 5, [], [], ""),
    ],
)


def series(name: str, **labels: str) -> Series:
    return Series(name, frozenset(labels.items()))


def requests(count: float, code: str = "ok", **labels: str) -> dict[Series, float]:
    return {series("penstock_requests_total", protocol="rest", code=code, **(labels or MINILM)): count}


def timed(what: str, counts: dict[str, float], total_s: float, **labels: str) -> dict[Series, float]:
    name = f"penstock_{what}_seconds"
    found = {series(f"{name}_bucket", le=le, **labels): count for le, count in counts.items()}
    return {**found, series(f"{name}_sum", **labels): total_s}


def look(before, after, seconds=2.0):
    """Return a snapshot; each value maps a process to counts, or to counts and gauges."""

    def snapshot(found):
        return {name: ProcessFigures(*(each if isinstance(each, tuple) else (each,))) for name, each in found.items()}

    return compare(snapshot(before), snapshot(after), seconds, 1000.0, STANDING)


def test_requests_are_counted_by_model_and_code_over_all_processes():
    live = look(
        {"gateway-0": requests(10) | requests(3, "queue_full")},
        {
            "gateway-0": requests(30) | requests(4, "queue_full") | requests(2, **SRCNN),
            "gateway-1": requests(6),
        },
    )
    assert live.work.requests_per_s == 14.5
    assert live.work.by_code == {"ok": 14.0, "queue_full": 0.5}
    assert live.requests_by_model == {"minilm": 13.5, "srcnn": 1.0}
    assert [block.work.requests_per_s for block in live.blocks] == [13.5, 1.0]
    assert live.blocks[0].work.by_code == {"ok": 13.0, "queue_full": 0.5}


def test_an_idle_interval_has_a_rate_of_zero():
    live = look({"gateway-0": requests(10)}, {"gateway-0": requests(10)})
    assert (live.work.requests_per_s, live.work.by_code) == (0.0, {})


def test_a_restarted_process_contributes_its_counts_since_the_restart():
    """Even counts that by now exceed the old ones must not be treated as a difference."""
    live = look(
        {"gateway-0": requests(1000) | requests(1, "draining"), "gateway-1": requests(5)},
        {"gateway-0": requests(4) | requests(3, "draining"), "gateway-1": requests(7)},
    )
    assert live.work.by_code == {"ok": 3.0, "draining": 1.5}


def test_an_ended_process_subtracts_nothing():
    live = look({"gateway-0": requests(5), "gateway-1": requests(50)}, {"gateway-0": requests(9)})
    assert live.work.requests_per_s == 2.0


def test_no_rate_is_ever_negative_or_infinite():
    live = look({"gateway-0": requests(5)}, {"gateway-0": requests(9)}, seconds=0.0)
    assert live.work.requests_per_s == 0.0


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([(1.0, 10)], 0.5, 0.5),
        ([(1.0, 5), (2.0, 5)], 0.5, 1.0),
        ([(1.0, 5), (2.0, 5)], 0.75, 1.5),
        ([(1.0, 0), (2.0, 0), (4.0, 8)], 0.5, 3.0),
        ([(1.0, 98), (2.0, 0), (4.0, 2)], 0.99, 3.0),
        ([(1.0, 1), (2.0, 0), (float("inf"), 9)], 0.5, 2.0),
        ([(1.0, 1), (2.0, 1)], 1.0, 2.0),
    ],
)
def test_percentiles_are_interpolated_within_a_bucket(buckets, share, expected):
    assert compute_percentile(buckets, share) == pytest.approx(expected)


def test_latency_covers_the_interval_and_all_processes():
    slow = timed("request", {"0.1": 0, "1.0": 1000, "+Inf": 0}, 900, **MINILM)
    live = look(
        {"gateway-0": slow},
        {
            "gateway-0": {**slow, **timed("request", {"0.1": 60, "1.0": 1000, "+Inf": 0}, 903, **MINILM)},
            "gateway-1": timed("request", {"0.1": 40, "1.0": 0, "+Inf": 0}, 2, **SRCNN),
        },
    )
    assert live.work.latency == Latency(100, 50.0, 50.0, 95.0, 99.0)
    assert [block.work.latency.count for block in live.blocks] == [60, 40]


def test_a_percentile_does_not_exceed_what_the_mean_allows():
    live = look({}, {"gateway-0": timed("admit", {"0.0001": 1000, "+Inf": 0}, 0.004, **MINILM)})
    assert live.work.phases["admit"] == Latency(1000, 0.004, 0.008, 0.08, 0.099)


def test_phases_have_their_mean_times():
    worker = timed("queue", {"0.1": 4, "+Inf": 0}, 0.2, **MINILM) | timed(
        "compute", {"1.0": 2, "+Inf": 0}, 1.5, **MINILM
    )
    live = look({"worker-0": {}}, {"worker-0": worker, "gateway-0": timed("admit", {"0.1": 4}, 0.004, **MINILM)})
    assert list(live.work.phases) == ["admit", "queue", "batch", "compute", "reply"]
    assert [live.work.phases[phase].mean_ms for phase in live.work.phases] == [1.0, 50.0, None, 750.0, None]


def test_batches_are_shown_with_fill_and_closing_reason():
    def counted(times: int) -> dict[Series, float]:
        return {
            series("penstock_batches_total", closed="rows", **MINILM): 2 * times,
            series("penstock_batches_total", closed="empty", **MINILM): 6 * times,
            series("penstock_batch_rows_sum", **MINILM): 100 * times,
            series("penstock_tokens_total", kind="real", **MINILM): 1000 * times,
            series("penstock_tokens_total", kind="padded", **MINILM): 1100 * times,
        }

    batches = look({"worker-0": counted(1)}, {"worker-0": counted(2)}).blocks[0].work.batches
    assert (batches.per_s, batches.rows_per_s, batches.rows_mean, batches.padding) == (4.0, 50.0, 12.5, 1.1)
    assert batches.closed == {"rows": 1.0, "tokens": 0.0, "padding": 0.0, "empty": 3.0, "delay": 0.0}


def test_waiting_and_running_requests_are_those_of_the_second_snapshot():
    gateway = {
        series("penstock_inflight_requests"): 5,
        series("penstock_inflight_bytes"): 500,
        series("penstock_queue_jobs", block="blk-m", state="waiting"): 2,
        series("penstock_queue_jobs", block="blk-m", state="running"): 3,
        series("penstock_queue_jobs", block="blk-s", state="running"): 1,
    }
    worker = {series("penstock_worker_waiting", **MINILM): 4}
    live = look({"gateway-0": ({}, gateway)}, {"gateway-0": ({}, gateway), "worker-0": ({}, worker)})
    now = live.now
    assert (now.inflight_requests, now.inflight_bytes, now.waiting, now.running, now.waiting_on_workers) == (
        5,
        500,
        2,
        4,
        4,
    )
    minilm, srcnn = live.blocks
    assert (minilm.waiting, minilm.running, minilm.waiting_on_workers) == (2, 3, 4)
    assert (srcnn.waiting, srcnn.running, srcnn.waiting_on_workers) == (0, 1, 0)
    assert (srcnn.state, srcnn.reason, srcnn.max_rows, minilm.max_rows) == ("failed", "no file", None, 32)


def test_each_worker_is_shown_separately():
    def worker(busy: int, idle: int, compute_s: float, batches: int):
        gauges = {
            series("penstock_instances", state="busy", **MINILM): busy,
            series("penstock_instances", state="idle", **MINILM): idle,
        }
        counts = {series("penstock_batches_total", closed="rows", **MINILM): batches}
        return counts | timed("compute", {"1.0": batches}, compute_s, **MINILM), gauges

    live = look(
        {"worker-0": worker(0, 2, 10.0, 100), "worker-1": worker(0, 2, 10.0, 100)},
        {"worker-0": worker(1, 1, 13.0, 110), "worker-1": (worker(0, 0, 10.0, 100)[0], {})},
    )
    first, gone, joined = live.workers
    assert (first.id, first.state, first.pid, first.memory_bytes, first.blocks) == (
        "worker-0", "ready", 7, 2**20, ["blk-m"],
    )  # fmt: skip
    assert (first.instances.busy, first.instances.idle, first.instances.busy_share) == (1, 1, 0.75)
    assert first.batches_per_s == 5.0
    assert (gone.id, gone.state, gone.pid, gone.memory_bytes, gone.instances.busy_share) == (
        "worker-1",
        "gone",
        None,
        0,
        None,
    )
    assert (joined.id, joined.state) == ("worker-2", "empty")
    assert live.blocks[0].instances.busy == 1


def test_a_gpus_time_is_divided_by_its_blocks_compute_time():
    seen = [
        ("worker-0", WorkerDevice("cuda:0", "GPU-1", "H", 100, 60, 0.8, 30, {"blk-m": 20, "blk-s": 10})),
        ("worker-2", WorkerDevice("cuda:0", "GPU-1", "H", 100, 61, 0.7, None, {"blk-m": 20})),
        ("worker-2", WorkerDevice("cuda:1", "GPU-2", "H", 50, 0, None, None, {"blk-m": 1})),
    ]
    standing = replace(STANDING, devices=merge_devices(seen))

    def computed(minilm_s: float, srcnn_s: float):
        return timed("compute", {"1.0": 1}, minilm_s, **MINILM) | timed("compute", {"1.0": 1}, srcnn_s, **SRCNN)

    before, after = (
        {name: ProcessFigures(computed(*spent)) for name, spent in found.items()}
        for found in (
            {"worker-0": (0.0, 0.0), "worker-1": (0.0, 0.0), "worker-2": (1.0, 0.0)},
            {"worker-0": (0.5, 1.0), "worker-1": (7.0, 0.0), "worker-2": (1.5, 0.0)},
        )
    )
    shared, other = compare(before, after, 2.0, 1000.0, standing).devices
    assert (shared.uuid, shared.used_bytes, shared.busy, shared.workers) == ("GPU-1", 61, 0.8, ["worker-0", "worker-2"])
    assert shared.blocks == [BlockOnDevice("blk-m", 40, 0.4), BlockOnDevice("blk-s", 10, 0.4)]
    assert (other.busy, other.blocks) == (None, [BlockOnDevice("blk-m", 1, None)])
    (idle, _) = compare(after, after, 2.0, 1000.0, standing).devices
    assert [block.busy for block in idle.blocks] == [None, None]


def test_failures_are_counted_since_the_last_snapshot_and_since_the_start():
    def lost(count: int) -> dict[Series, float]:
        return {
            series("penstock_workers_lost_total", reason="died"): count,
            series("penstock_workers_lost_total", reason="left"): 0,
            series("penstock_refusals_total", reason="queue_full"): 10 * count,
        }

    troubles = look({"gateway-0": lost(2)}, {"gateway-0": lost(3)}).troubles
    assert troubles.workers_lost == {"died": EventCount(1, 3)}
    assert troubles.refusals == {"queue_full": EventCount(10, 30)}
    assert troubles.retries == {}


def test_an_idle_server_has_an_empty_view():
    live = look({}, {})
    assert live.work.latency == Latency(0, None, None, None, None)
    assert live.work.batches.rows_mean is None
    assert [worker.state for worker in live.workers] == ["ready", "empty"]
    assert orjson.loads(orjson.dumps(live)) == asdict(live)


def test_the_reader_separates_processes_counts_and_gauges(tmp_path: Path):
    def write(file: str, *values: tuple[str, dict[str, str], float]) -> None:
        found = MmapedDict(str(tmp_path / file))
        for name, labels, value in values:
            found.write_value(
                mmap_key(name.removesuffix("_total"), name, list(labels), list(labels.values()), "help"), value, 0.0
            )
        found.close()

    write("counter_gateway-0.db", ("seen_total", {"kind": "a"}, 3.0), ("seen_total", {"kind": "b"}, 1.0))
    write("gauge_livesum_gateway-0.db", ("inside", {}, 7.0))
    write("histogram_worker-0.db", ("took_bucket", {"le": "0.1"}, 2.0))
    reader = SnapshotReader(tmp_path)
    for _ in range(2):  # parsed, and known
        found = reader.read()
        assert found["gateway-0"].counts == {series("seen_total", kind="a"): 3.0, series("seen_total", kind="b"): 1.0}
        assert found["gateway-0"].gauges == {series("inside"): 7.0}
        assert found["worker-0"] == ProcessFigures({series("took_bucket", le="0.1"): 2.0})
    (tmp_path / "gauge_livesum_gateway-0.db").unlink()
    assert reader.read()["gateway-0"].gauges == {}


def test_generated_text_is_shown_with_its_speed_and_its_engines():
    before = {
        "worker-0": {
            series("penstock_generation_steps_total", **MINILM): 5.0,
            series("penstock_generated_tokens_total", **MINILM): 100.0,
        }
    }
    counts = {
        series("penstock_generation_steps_total", **MINILM): 9.0,
        series("penstock_generated_tokens_total", **MINILM): 180.0,
        series("penstock_prompt_tokens_total", **MINILM): 60.0,
        series("penstock_prefix_hit_tokens_total", **MINILM): 15.0,
        series("penstock_preemptions_total", **MINILM): 2.0,
        series("penstock_generated_answers_total", finish="stop", **MINILM): 4.0,
        series("penstock_request_tokens_per_second_bucket", le="30.0", **MINILM): 4.0,
        series("penstock_request_tokens_per_second_sum", **MINILM): 100.0,
        **timed("engine_time_to_first_token", {"0.1": 4.0}, 0.2, **MINILM),
    }
    gauges = {
        series("penstock_generations", state="running", **MINILM): 3.0,
        series("penstock_generations", state="waiting", **MINILM): 1.0,
        series("penstock_kv_cache_blocks", kind="used", **MINILM): 20.0,
        series("penstock_kv_cache_blocks", kind="all", **MINILM): 80.0,
    }
    at_endpoints = timed("time_to_first_token", {"0.1": 2.0}, 0.12, **MINILM)
    live = look(before, {"worker-0": (counts, gauges), "gateway-0": at_endpoints})
    found = live.generating
    assert found is not None
    assert found == live.blocks[0].generating
    assert live.blocks[1].generating is None
    assert (found.tokens_per_s, found.prompt_tokens_per_s, found.request_tokens_per_s) == (40.0, 30.0, 25.0)
    assert (found.answers, found.prefix_hits) == ({"stop": 2.0}, 0.25)
    assert (found.first_token.count, found.first_token.mean_ms) == (2, 60.0)
    assert (found.engine_first_token.count, found.engine_first_token.mean_ms) == (4, 50.0)
    assert found.between_tokens.count == 0
    assert (found.running, found.waiting, found.cache_blocks_used, found.cache_blocks) == (3, 1, 20, 80)
    assert found.preemptions == EventCount(2, 2)
    assert live.workers[0].tokens_per_s == 40.0
    assert look({}, {"worker-0": requests(1)}).generating is None
