"""The local lane: a gateway's dispatcher over the worker of its own process."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from math import inf

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.local_worker import LocalOffer, LocalReceiver, LocalTask
from penstock.core.errors import EngineFailed, ModelNotReady
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.settings import BlockSettings
from penstock.core.statistics import BlockStatistics
from penstock.router.answers import MAX_ANSWERS_AHEAD, AnswerStream
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.local_lane import LocalLane
from penstock.telemetry.metrics import RouterMetrics

BLOCK = BlockDescription("blk", "m", "1", "", "", (), (), 8, 1, BlockSettings())


@dataclass
class FakeWorker:
    worker_id: str = "worker-0"
    receiver: LocalReceiver | None = None
    taken: list[LocalTask] = field(default_factory=list)
    said: list[tuple[str, int | str]] = field(default_factory=list)

    def attach(self, receiver: LocalReceiver) -> None:
        self.receiver = receiver
        receiver.receive_offers([LocalOffer(BLOCK, 2)])

    def run(self, task: LocalTask) -> None:
        self.taken.append(task)

    def cancel(self, job_id: int) -> None:
        self.said.append(("cancel", job_id))

    def recall(self, job_id: int) -> None:
        self.said.append(("recall", job_id))

    def allow(self, job_id: int, answers: int) -> None:
        self.said.append(("allow", answers))

    def probe(self, block_id: str) -> None:
        self.said.append(("probe", block_id))

    def wake(self, block_id: str) -> None:
        self.said.append(("wake", block_id))

    def collect_statistics(self) -> Iterable[BlockStatistics]:
        return []

    def detach(self) -> None:
        self.receiver = None

    def hears(self) -> LocalReceiver:
        assert self.receiver is not None
        return self.receiver

    def answer(self, index: int, is_final: bool = True) -> None:
        task = self.taken[index]
        response = InferResponse("", "", "", [], Timing(), is_final=is_final)
        self.hears().receive_answer(task.job_id, task.attempt, response)


class Gate:
    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.offers: list[list[str]] = []
        self.dispatcher = Dispatcher(RouterMetrics(CollectorRegistry()))
        self.lane = LocalLane(
            self.worker, self.dispatcher, lambda offers: self.offers.append([o[0].block_id for o in offers])
        )
        self.dispatcher.add(self.lane)
        self.lane.open()

    async def ask(self, request_id: str = "r") -> "asyncio.Task[InferResponse]":
        request = InferRequest("m", [], request_id=request_id)
        asking = asyncio.create_task(self.dispatcher.run(BLOCK, request, time.monotonic() + 30))
        await asyncio.sleep(0)
        return asking


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate()
    yield made
    await made.dispatcher.stop()


async def test_a_job_is_passed_on_and_its_answer_returned(gate: Gate) -> None:
    asking = await gate.ask("first")
    (task,) = gate.worker.taken
    assert (task.block_id, task.request.request_id, task.queue_deadline, task.answers_ahead) == ("blk", "first", inf, 0)
    gate.worker.answer(0)
    answered = await asking
    assert (answered.model, answered.request_id) == ("m", "first")
    failing = await gate.ask()
    gate.worker.hears().receive_answer(gate.worker.taken[1].job_id, 1, EngineFailed("no"))
    with pytest.raises(EngineFailed):
        await failing


async def test_no_more_jobs_are_sent_than_credits_and_a_returned_job_is_sent_again(gate: Gate) -> None:
    asking = [await gate.ask() for _ in range(3)]
    assert len(gate.worker.taken) == 2
    gate.worker.answer(0)
    assert len(gate.worker.taken) == 3
    gate.worker.hears().take_back_jobs([gate.worker.taken[1].job_id])
    assert gate.worker.taken[3].request is gate.worker.taken[1].request
    gate.worker.answer(2)
    gate.worker.answer(3)
    await asyncio.gather(*asking)


async def test_a_leaving_callers_job_is_cancelled_and_jobs_of_a_removed_block_fail(gate: Gate) -> None:
    asking = await gate.ask()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert gate.worker.said == [("cancel", gate.worker.taken[0].job_id)]
    waiting = [await gate.ask() for _ in range(3)]
    gate.worker.hears().receive_offers([])
    assert gate.offers == [["blk"], []]
    assert gate.dispatcher.list_descriptions() == {}
    gate.worker.hears().take_back_jobs([task.job_id for task in gate.worker.taken[1:]])
    gate.dispatcher.retire_blocks({"blk": ModelNotReady("gone")})
    for each in waiting:
        with pytest.raises(ModelNotReady):
            await each


async def test_a_stream_requests_more_answers_as_they_are_taken(gate: Gate) -> None:
    stream = AnswerStream()
    run = gate.dispatcher.run(BLOCK, InferRequest("m", [], answers=stream), time.monotonic() + 30)
    answers = stream.follow(run)
    first = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(MAX_ANSWERS_AHEAD // 2):
        gate.worker.answer(0, is_final=False)
    await first
    for _ in range(MAX_ANSWERS_AHEAD // 2 - 1):
        await anext(answers)
    gate.worker.answer(0)
    assert (await anext(answers)).is_final
    assert ("allow", MAX_ANSWERS_AHEAD // 2) in gate.worker.said
