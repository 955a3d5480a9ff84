"""A worker's link to the gateway in its own process, with a real runner."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from math import inf

import numpy as np
import pytest

from benchmarks.waiting import until
from penstock.core.cluster.local_worker import LocalOffer, LocalTask
from penstock.core.errors import PenstockError
from penstock.core.requests import Controls, InferRequest, InferResponse, SessionStep
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import from_array, to_array
from penstock.models.model_yaml import ModelSettings
from penstock.worker.local_link import IDLE_S, LocalLink
from penstock.worker.worker_job import Holder
from tests.worker_bed import Bed


class Receiver:
    def __init__(self) -> None:
        self.offers: list[Sequence[LocalOffer]] = []
        self.answers: dict[int, InferResponse | PenstockError] = {}
        self.returned: list[int] = []
        self.probes: list[tuple[str, str]] = []
        self.is_inside = False

    def receive_offers(self, offers: Sequence[LocalOffer]) -> None:
        self.offers.append(offers)

    def receive_answer(self, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        assert not self.is_inside, "the worker calls the endpoint only after a call has ended"
        self.answers[job_id] = outcome

    def take_back_jobs(self, job_ids: Sequence[int]) -> None:
        assert not self.is_inside, "the worker calls the endpoint only after a call has ended"
        self.returned += job_ids

    def receive_probe_result(self, block_id: str, problem: str) -> None:
        self.probes.append((block_id, problem))


class Linked:
    def __init__(self) -> None:
        self.bed = Bed(ModelSettings(engine="onnx"))
        self.holders: dict[str, Holder] = {"blk": self.bed.runner}
        self.receiver = Receiver()
        self.announced = 0
        self.blocks = self
        self.link = LocalLink("worker-0", self)

    # --- a LocalOwner

    def local_offers(self) -> list[LocalOffer]:
        return [LocalOffer(self.bed.runner.description, 4)]

    def announce(self) -> None:
        self.announced += 1
        self.link.say_hello()

    # --- its Holders

    def holder(self, block_id: str) -> Holder | None:
        return self.holders.get(block_id)

    def statistics(self) -> list[BlockStatistics]:
        return [self.bed.runner.statistics]

    def probe(self, block_id: str, done: Callable[[str], None]) -> None:
        self.bed.runner.probe(done)

    def wake(self, block_id: str) -> None: ...

    def run(self, job_id: int, value: float, block_id: str = "blk", controls: Controls | None = None) -> LocalTask:
        request = InferRequest("m", [from_array("x", np.array([[value]], np.float32))])
        request.controls = controls or request.controls
        task = LocalTask(job_id, 1, block_id, request, time.monotonic() + 30, inf, 0)
        self.receiver.is_inside = True
        self.link.run(task)
        self.receiver.is_inside = False
        return task


@pytest.fixture
async def linked() -> AsyncIterator[Linked]:
    made = Linked()
    made.link.attach(made.receiver)
    yield made
    made.bed.close()


async def test_an_attached_gateway_gets_the_offers_and_answers(linked: Linked) -> None:
    assert [offer.block.block_id for offer in linked.receiver.offers[0]] == ["blk"]
    session = Controls(priority=2, session=SessionStep("s", is_ordered=False))
    task = linked.run(1, 4.0)
    linked.run(2, 5.0, controls=session)
    await until(lambda: len(linked.receiver.answers) == 2)
    for job_id, doubled in ((1, 8.0), (2, 10.0)):
        response = linked.receiver.answers[job_id]
        assert isinstance(response, InferResponse)
        assert response.is_final
        assert to_array(response.outputs[0]).ravel().tolist() == [doubled]
        assert response.timing.batch_rows
    assert len(task.request.inputs) == 1  # a caller that sends it again still has the inputs
    linked.link.probe("blk")
    await until(lambda: linked.receiver.probes == [("blk", "")])


async def test_jobs_of_an_absent_block_are_handed_back_after_the_call(linked: Linked) -> None:
    linked.run(1, 1.0, "blk-other")
    await until(lambda: linked.receiver.returned == [1])


async def test_a_job_that_has_not_run_can_be_recalled_or_cancelled(linked: Linked) -> None:
    linked.bed.engine.gate.clear()
    for job_id in range(1, 5):
        linked.run(job_id, 1.0)
    await asyncio.sleep(0)
    linked.link.cancel(4)
    linked.link.hand_back(linked.bed.runner.hand_back())
    linked.bed.engine.gate.set()
    await until(lambda: {*linked.receiver.returned, *linked.receiver.answers} >= {1, 2, 3})
    assert 4 not in linked.receiver.answers
    assert 4 not in linked.receiver.returned


async def test_a_closed_endpoint_receives_nothing_more_and_its_jobs_end(linked: Linked) -> None:
    linked.bed.engine.gate.clear()
    linked.run(1, 1.0)
    linked.link.detach()
    linked.bed.engine.gate.set()
    await linked.bed.runner.drain()
    assert not linked.receiver.answers
    assert not linked.link.is_in_use


async def test_the_direct_endpoint_shares_the_worker_with_gateways(linked: Linked) -> None:
    assert (linked.link.is_in_use, linked.announced) == (False, 1)
    linked.run(1, 1.0)
    linked.run(2, 1.0)
    assert (linked.link.is_in_use, linked.announced) == (True, 2)
    linked.link.tick(time.monotonic() + 2 * IDLE_S)
    assert linked.link.is_in_use  # they run
    await until(lambda: len(linked.receiver.answers) == 2)
    linked.link.tick(time.monotonic())
    assert linked.link.is_in_use
    linked.link.tick(time.monotonic() + 2 * IDLE_S)
    assert (linked.link.is_in_use, linked.announced) == (False, 3)
