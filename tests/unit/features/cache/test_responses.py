"""The response cache: hits, answers that are never stored, and failures of the store."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.valkey import Valkey
from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription
from penstock.core.config import CacheSettings
from penstock.core.errors import DeadlineExceeded, EngineFailed, WorkerLost
from penstock.core.requests import Controls, InferRequest, InferResponse, SessionStep, Timing
from penstock.core.settings import BlockSettings, Caching, Sessions
from penstock.core.tensors import Tensor
from penstock.features.cache.responses import MAX_INLINE_DIGEST, ResponseCache
from penstock.features.cache.stores.cache_store import open_store
from penstock.features.cache.stores.memory_cache import MemoryStore
from penstock.storage.outage import RETRY_S
from penstock.telemetry.metrics import CacheMetrics

BLOCK = BlockDescription(
    "blk-1",
    "m",
    "1",
    "onnxruntime_onnx",
    "fp32",
    (),
    (),
    8,
    1,
    BlockSettings(cache=Caching(enabled=True)),
    fingerprint="f1",
)
FAR_S = 60.0


class Model:
    """A model that doubles its input and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None
        self.once: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.copies = 2

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        self.runs += 1
        await self.gate.wait()
        error, self.once = self.once or self.error, None
        if error is not None:
            raise error
        data = bytes(request.inputs[0].data) * self.copies
        output = Tensor("y", "UINT8", (len(data),), data)
        timing = Timing(queue_ns=1, compute_ns=250_000_000, batch_rows=4)
        return InferResponse(request.model, request.version, request.request_id, [output], timing, {"note": "n"})


class Harness:
    def __init__(self, folder: Path, timeout_s: float = 5.0, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        chosen = CacheSettings(**settings)
        self.others: set[str] = set()  # blocks whose files changed
        self.cache = ResponseCache(
            open_store(chosen, "gateway-0", folder, timeout_s),
            chosen,
            CacheMetrics(self.registry),
            lambda block: block.block_id not in self.others,
        )
        self.model = Model()

    async def ask(
        self, data: bytes = b"ab", block: BlockDescription = BLOCK, timeout_s: float = FAR_S, **request: Any
    ) -> InferResponse:
        asked = InferRequest("m", [Tensor("x", "UINT8", (len(data),), data)], **request)
        return await self.cache.run(block, asked, time.monotonic() + timeout_s, self.model.run)

    def count(self, outcome: str) -> float | None:
        labels = {"model": "m", "version": "1", "outcome": outcome}
        self.cache.publish()
        return self.registry.get_sample_value("penstock_cache_requests_total", labels)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def is_hit(response: InferResponse) -> bool:
    return response.parameters.get("cache") == "hit"


def answered(response: InferResponse) -> bytes:
    return bytes(response.outputs[0].data)


async def test_a_repeated_request_gets_the_stored_answer(harness: Harness) -> None:
    miss = await harness.ask(request_id="r-1")
    hit = await harness.ask(request_id="r-2")
    assert harness.model.runs == 1
    assert (miss.request_id, miss.parameters, miss.timing.batch_rows) == ("r-1", {"note": "n"}, 4)
    assert (hit.request_id, hit.parameters, hit.timing) == ("r-2", {"note": "n", "cache": "hit"}, Timing())
    assert (hit.model, hit.version) == ("m", "1")
    assert answered(miss) == answered(hit) == b"abab"
    assert hit.outputs[0].shape == (4,)


async def test_a_different_request_runs(harness: Harness) -> None:
    await harness.ask(b"ab")
    assert answered(await harness.ask(b"cd")) == b"cdcd"
    assert not is_hit(await harness.ask(b"ab", parameters={"p": 1}))
    assert not is_hit(await harness.ask(b"ab", outputs=["y"]))
    assert harness.model.runs == 4


async def test_another_block_or_changed_files_run(harness: Harness) -> None:
    await harness.ask()
    for block in (
        replace(BLOCK, block_id="blk-2"),
        replace(BLOCK, fingerprint="f2"),
        replace(BLOCK, version="2"),
    ):
        assert not is_hit(await harness.ask(block=block))
    assert harness.model.runs == 4
    assert is_hit(await harness.ask())


async def test_bypass_neither_reads_nor_writes_nor_shares(harness: Harness) -> None:
    bypass = Controls(cache="bypass")
    await harness.ask(controls=bypass)
    assert not is_hit(await harness.ask())
    assert not is_hit(await harness.ask(controls=bypass))
    assert harness.model.runs == 3
    harness.model.gate.clear()
    tasks = [asyncio.create_task(harness.ask(b"cd", controls=bypass)) for _ in range(3)]
    await asyncio.sleep(0)
    harness.model.gate.set()
    await asyncio.gather(*tasks)
    assert harness.model.runs == 6


async def test_refresh_runs_and_stores_the_answer(harness: Harness) -> None:
    await harness.ask()
    harness.model.copies = 3
    fresh = await harness.ask(controls=Controls(cache="refresh"))
    assert (answered(fresh), is_hit(fresh)) == (b"ababab", False)
    again = await harness.ask()
    assert (answered(again), is_hit(again)) == (b"ababab", True)


@pytest.mark.parametrize(
    "block",
    [
        replace(BLOCK, settings=BlockSettings()),
        replace(BLOCK, fingerprint=""),
        replace(BLOCK, settings=BlockSettings(cache=Caching(enabled=True), sessions=Sessions(is_stateful=True))),
        replace(BLOCK, settings=BlockSettings(cache=Caching(enabled=True), is_decoupled=True)),
    ],
    ids=["not-enabled", "no-fingerprint", "stateful", "decoupled"],
)
async def test_some_blocks_are_never_cached(harness: Harness, block: BlockDescription) -> None:
    for _ in range(2):
        assert not is_hit(await harness.ask(block=block))
    assert (harness.model.runs, harness.cache.statistics()["entries"]) == (2, 0)


@pytest.mark.parametrize(
    ("parameters", "is_stored"),
    [
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": "hot"}, False),
        ({"temperature": 0}, True),
        ({"temperature": "0.0"}, True),
        ({"temperature": 1, "seed": 7}, True),
    ],
)
async def test_generated_text_is_stored_only_if_it_is_reproducible(
    harness: Harness, parameters: dict[str, Any], is_stored: bool
) -> None:
    settings = BlockSettings(task="generate", cache=Caching(enabled=True))
    generating = replace(BLOCK, settings=settings)
    await harness.ask(block=generating, parameters=parameters)
    assert is_hit(await harness.ask(block=generating, parameters=parameters)) == is_stored


async def test_a_request_of_a_session_is_never_cached(harness: Harness) -> None:
    for number in (1, 2):
        await harness.ask(controls=Controls(session=SessionStep("s", number)))
    assert (harness.model.runs, harness.cache.statistics()["entries"]) == (2, 0)


async def test_failures_are_not_stored(harness: Harness) -> None:
    harness.model.error = EngineFailed("no")
    with pytest.raises(EngineFailed):
        await harness.ask()
    with pytest.raises(EngineFailed):
        await harness.ask(controls=Controls(cache="refresh"))
    harness.model.error = None
    assert not is_hit(await harness.ask())
    assert harness.model.runs == 3


async def test_a_large_answer_is_not_stored(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_bytes=160_000)
    for _ in range(2):
        assert not is_hit(await harness.ask(bytes(5001)))
    assert harness.model.runs == 2
    await harness.ask(bytes(4000))
    assert is_hit(await harness.ask(bytes(4000)))


async def test_the_cache_is_bounded(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_bytes=100_000)
    for number in range(200):
        await harness.ask(number.to_bytes(1000, "little"))
    found = harness.cache.statistics()
    assert 0 < found["bytes"] <= 100_000
    assert found["evictions"]["size"] == 200 - found["entries"]
    assert is_hit(await harness.ask((199).to_bytes(1000, "little")))
    assert not is_hit(await harness.ask((0).to_bytes(1000, "little")))


async def test_a_model_can_set_the_lifetime_of_its_answers(harness: Harness) -> None:
    short = replace(BLOCK, settings=BlockSettings(cache=Caching(enabled=True, ttl_s=1e-6)))
    await harness.ask(block=short)
    assert not is_hit(await harness.ask(block=short))
    assert harness.model.runs == 2


async def test_two_hundred_identical_requests_run_once(harness: Harness) -> None:
    harness.model.gate.clear()
    tasks = [asyncio.create_task(harness.ask(request_id=f"r-{number}")) for number in range(200)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert harness.cache.statistics()["in_flight"] == 1
    harness.model.gate.set()
    found = await asyncio.gather(*tasks)
    assert harness.model.runs == 1
    assert [one.request_id for one in found] == [f"r-{number}" for number in range(200)]
    assert {answered(one) for one in found} == {b"abab"}
    assert not any(is_hit(one) for one in found)
    assert (harness.count("miss"), harness.count("shared")) == (1, 199)


async def test_a_waiting_caller_keeps_its_deadline_and_a_lost_worker_is_not_shared(harness: Harness) -> None:
    harness.model.gate.clear()
    harness.model.once = WorkerLost("died")
    leader = asyncio.create_task(harness.ask())
    await asyncio.sleep(0)
    hasty = asyncio.create_task(harness.ask(timeout_s=0.02))
    patient = asyncio.create_task(harness.ask())
    with pytest.raises(DeadlineExceeded):
        await hasty
    harness.model.gate.set()
    with pytest.raises(WorkerLost):
        await leader
    assert answered(await patient) == b"abab"
    assert is_hit(await harness.ask())


async def test_entries_of_a_block_or_all_entries_can_be_deleted(harness: Harness) -> None:
    other = replace(BLOCK, block_id="blk-11")
    await harness.ask()
    await harness.ask(block=other)
    assert await harness.cache.delete("blk-1") == 1
    assert is_hit(await harness.ask(block=other))
    assert not is_hit(await harness.ask())
    assert await harness.cache.delete() == 2
    assert not is_hit(await harness.ask(block=other))


async def test_a_run_during_deletion_is_not_stored(harness: Harness) -> None:
    harness.model.gate.clear()
    running = asyncio.create_task(harness.ask())
    for _ in range(5):
        await asyncio.sleep(0)
    await harness.cache.delete()
    harness.model.gate.set()
    await running
    assert not is_hit(await harness.ask())


async def test_an_unreadable_entry_is_run_and_stored_again(harness: Harness) -> None:
    await harness.ask()
    store = harness.cache._store
    assert isinstance(store, MemoryStore)
    (key,) = list(store._lru)
    await store.set(key, b"\x01 no answer", 60.0)
    assert answered(await harness.ask()) == b"abab"
    assert harness.cache.statistics()["errors"] > 0
    assert is_hit(await harness.ask())


async def test_the_key_of_a_large_request_is_computed_in_a_thread(harness: Harness) -> None:
    harness.model.copies = 0
    large = bytes(MAX_INLINE_DIGEST + 1)
    await harness.ask(large, size_bytes=len(large))
    assert is_hit(await harness.ask(large, size_bytes=len(large)))
    assert not is_hit(await harness.ask(large[:-1] + b"\x01", size_bytes=len(large)))


async def test_outcomes_are_counted(harness: Harness) -> None:
    await harness.ask()
    await harness.ask()
    await harness.ask()
    await harness.ask(controls=Controls(cache="bypass"))
    await harness.ask(controls=Controls(cache="refresh"))
    assert {outcome: harness.count(outcome) for outcome in ("hit", "miss", "shared", "bypass", "refresh")} == {
        "hit": 2,
        "miss": 1,
        "shared": 0,
        "bypass": 1,
        "refresh": 1,
    }
    labels = {"model": "m", "version": "1"}
    assert harness.registry.get_sample_value("penstock_cache_saved_seconds_total", labels) == pytest.approx(0.5)
    assert harness.registry.get_sample_value("penstock_cache_entries") == 1
    found = harness.cache.statistics()
    assert harness.registry.get_sample_value("penstock_cache_bytes") == found["bytes"] > 0
    assert (found["store"], found["hit"], found["miss"], found["entries"]) == ("memory", 2, 1, 1)
    assert found["blocks"]["blk-1"] == {
        "model": "m",
        "version": "1",
        "hit": 2,
        "miss": 1,
        "shared": 0,
        "bypass": 1,
        "refresh": 1,
        "saved_seconds": pytest.approx(0.5),
    }


async def test_evictions_are_counted_by_reason(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_bytes=20_000)
    short = replace(BLOCK, settings=BlockSettings(cache=Caching(enabled=True, ttl_s=1e-6)))
    await harness.ask(b"short", block=short)
    for number in range(40):
        await harness.ask(b"%d" % number)
    harness.cache.publish()

    def evicted(reason: str) -> float | None:
        return harness.registry.get_sample_value("penstock_cache_evictions_total", {"reason": reason})

    assert evicted("ttl") == 1
    assert evicted("size") == 40 - harness.cache.statistics()["entries"] > 0


async def test_answers_survive_a_restart_with_sqlite(tmp_path: Path) -> None:
    first = Harness(tmp_path, url="sqlite://")
    await first.cache.start()
    await first.ask()
    await first.cache.close()
    second = Harness(tmp_path, url="sqlite://")
    await second.cache.start()
    found = await second.ask(request_id="r-9")
    assert (answered(found), is_hit(found), found.request_id, second.model.runs) == (b"abab", True, "r-9", 0)
    assert second.count("hit") == 1
    await second.cache.close()


async def test_gateways_share_answers_through_redis(tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey") as valkey:
        first, second = (Harness(tmp_path, url=valkey.url) for _ in range(2))
        await first.cache.start()
        await second.cache.start()
        await first.ask()
        assert is_hit(await first.ask())
        assert is_hit(await second.ask())
        assert (first.model.runs, second.model.runs) == (1, 0)
        assert await second.cache.delete("blk-1") == 1
        assert not is_hit(await first.ask())
        tasks = [asyncio.create_task(second.ask(b"new")) for _ in range(200)]
        await asyncio.gather(*tasks)
        assert second.model.runs == 1
        await first.cache.close()
        await second.cache.close()


async def test_requests_continue_while_redis_is_killed_and_use_it_again_later(tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey") as valkey:
        harness = Harness(tmp_path, url=valkey.url)
        await harness.cache.start()
        stop = asyncio.Event()
        asked = 0

        async def load() -> None:
            nonlocal asked
            while not stop.is_set():
                data = b"%d" % (asked % 50)
                asked += 1
                assert answered(await harness.ask(data)) == data * 2

        async def some(count: int) -> None:
            target = asked + count
            async with asyncio.timeout(30):
                while asked < target:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(load()) for _ in range(8)]
        await some(200)
        valkey.kill()
        await some(200)
        assert harness.cache.statistics()["errors"] > 0
        valkey.start()
        hits = harness.cache.statistics()["hit"]
        async with asyncio.timeout(30 + RETRY_S):
            while harness.cache.statistics()["hit"] == hits:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*tasks)
        await harness.cache.close()


@pytest.mark.parametrize("mode", ["use", "refresh"])
async def test_an_answer_of_possibly_changed_files_is_returned_but_not_stored(
    tmp_path: Path, mode: Literal["use", "refresh"]
) -> None:
    harness = Harness(tmp_path)
    harness.model.gate.clear()
    asked = asyncio.create_task(harness.ask(controls=Controls(cache=mode)))
    await until(lambda: harness.model.runs == 1, "it runs")
    harness.others.add(BLOCK.block_id)
    harness.model.gate.set()
    await asked
    await harness.ask()
    assert harness.model.runs == 2
