"""A dispatcher with two lanes: each worker gets messages about its own jobs on its own lane."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.errors import EngineFailed
from penstock.core.requests import InferResponse, Timing
from penstock.core.statistics import BlockStatistics
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.lane import ConnectedWorker
from penstock.router.slots import Job, Offer
from penstock.telemetry.metrics import RouterMetrics
from tests.unit.router.peers import block, request


class FakeLane:
    """A lane that records its messages."""

    def __init__(self, name: str) -> None:
        self.worker = ConnectedWorker(name.encode(), name, 1, self, blocks={"blk": block()})
        self.said: list[tuple[object, ...]] = []
        self.sent: list[Job] = []
        self.ticks = 0
        self.is_closed = False

    def send(self, worker: bytes, job: Job) -> None:
        assert worker == self.worker.key
        self.sent.append(job)

    def cancel(self, worker: bytes, job_id: int) -> None:
        self.said.append(("cancel", worker, job_id))

    def recall(self, worker: bytes, job_id: int) -> None:
        self.said.append(("recall", worker, job_id))

    def allow(self, worker: bytes, job_id: int, answers: int) -> None:
        self.said.append(("allow", worker, job_id, answers))

    def probe(self, worker: bytes, block_id: str) -> None:
        self.said.append(("probe", worker, block_id))

    def wake(self, worker: bytes, block_id: str) -> None:
        self.said.append(("wake", worker, block_id))

    async def collect_statistics(self) -> list[BlockStatistics]:
        return [BlockStatistics("blk", "m", "1", inference_count=2)]

    def tick(self, now: float) -> None:
        self.ticks += 1

    def close(self) -> None:
        self.is_closed = True


class Bench:
    def __init__(self) -> None:
        self.dispatcher = Dispatcher(RouterMetrics(CollectorRegistry()))
        self.lanes = [FakeLane("a"), FakeLane("b")]
        for lane in self.lanes:
            self.dispatcher.add(lane)
            self.join(lane)

    def join(self, lane: FakeLane) -> None:
        self.dispatcher.add_worker(lane.worker, [Offer("blk", 1, lane.worker.worker_id)], ())

    async def ask(self) -> asyncio.Task[InferResponse]:
        asked = asyncio.create_task(self.dispatcher.run(block(), request(), time.monotonic() + 60.0))
        await asyncio.sleep(0)
        return asked


def answer() -> InferResponse:
    return InferResponse("", "", "", [], Timing())


async def test_jobs_are_sent_to_workers_of_every_lane_and_answers_returned() -> None:
    bench = Bench()
    asked = [await bench.ask(), await bench.ask()]
    for lane in bench.lanes:
        (job,) = lane.sent
        bench.dispatcher.receive_answer(lane.worker.key, job.job_id, job.attempt, answer())
    responses = await asyncio.gather(*asked)
    assert [(found.model, found.version, found.request_id) for found in responses] == [("m", "1", "r")] * 2


async def test_the_job_of_a_worker_that_leaves_its_lane_is_sent_to_another() -> None:
    bench = Bench()
    first, second = bench.lanes
    bench.dispatcher.remove_worker(second.worker, "left")
    asked = await bench.ask()
    bench.join(second)
    bench.dispatcher.remove_worker(first.worker, "left")
    (job,) = second.sent
    assert job.attempt == 2
    bench.dispatcher.receive_answer(b"b", job.job_id, job.attempt, EngineFailed("it broke"))
    with pytest.raises(EngineFailed):
        await asked
    assert [member.worker_id for member in bench.dispatcher.list_workers()] == ["b"]


async def test_a_cancel_and_a_wake_are_sent_on_the_workers_lane() -> None:
    bench = Bench()
    first, second = bench.lanes
    second.worker.dormant = {"blk"}
    bench.dispatcher.wake("blk")
    bench.dispatcher.remove_worker(first.worker, "left")
    asked = await bench.ask()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert first.said == []
    assert second.said == [("wake", b"b", "blk"), ("cancel", b"b", second.sent[0].job_id)]


async def test_statistics_ticks_and_close_apply_to_all_lanes() -> None:
    bench = Bench()
    (total,) = await bench.dispatcher.collect_statistics()
    assert total.inference_count == 4
    bench.dispatcher.start()
    await until(lambda: all(lane.ticks for lane in bench.lanes))
    await bench.dispatcher.stop()
    assert all(lane.is_closed for lane in bench.lanes)
