"""A worker's link to the gateway in its own process, over a runner that runs."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from math import inf

import numpy as np
import pytest

from benchmarks.waiting import until
from penstock.core.cluster.local import LocalOffer, LocalTask
from penstock.core.errors import PenstockError
from penstock.core.requests import Controls, InferRequest, InferResponse, SessionStep
from penstock.core.tensors import from_array, to_array
from penstock.models.settings import ModelSettings
from penstock.worker.job import Holder
from penstock.worker.local import IDLE_S, LocalLink, LocalOwner
from tests.worker_bed import Bed


class Ears:
    def __init__(self) -> None:
        self.offers: list[Sequence[LocalOffer]] = []
        self.answers: dict[int, InferResponse | PenstockError] = {}
        self.returned: list[int] = []
        self.probes: list[tuple[str, str]] = []
        self.is_inside = False

    def offered(self, offers: Sequence[LocalOffer]) -> None:
        self.offers.append(offers)

    def answered(self, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        assert not self.is_inside, "told in the midst of a call"
        self.answers[job_id] = outcome

    def handed_back(self, job_ids: Sequence[int]) -> None:
        assert not self.is_inside, "told in the midst of a call"
        self.returned += job_ids

    def probed(self, block_id: str, problem: str) -> None:
        self.probes.append((block_id, problem))


class Linked:
    def __init__(self) -> None:
        self.bed = Bed(ModelSettings(engine="onnx"))
        self.holders: dict[str, Holder] = {"blk": self.bed.runner}
        self.ears = Ears()
        self.announced = 0
        offers = [LocalOffer(self.bed.runner.description, 4)]
        self.link = LocalLink(
            "worker-0",
            LocalOwner(
                self.holders.get,
                lambda: offers,
                lambda: [self.bed.runner.statistics],
                lambda block_id, done: self.bed.runner.probe(done),
                lambda block_id: None,
                self.announce,
            ),
        )

    def announce(self) -> None:
        self.announced += 1
        self.link.say_hello()

    def run(self, job_id: int, value: float, block_id: str = "blk", controls: Controls | None = None) -> LocalTask:
        request = InferRequest("m", [from_array("x", np.array([[value]], np.float32))])
        request.controls = controls or request.controls
        task = LocalTask(job_id, 1, block_id, request, time.monotonic() + 30, inf, 0)
        self.ears.is_inside = True
        self.link.run(task)
        self.ears.is_inside = False
        return task


@pytest.fixture
async def linked() -> AsyncIterator[Linked]:
    made = Linked()
    made.link.attach(made.ears)
    yield made
    made.bed.close()


async def test_who_attaches_hears_what_is_here_and_gets_answers(linked: Linked) -> None:
    assert [offer.block.block_id for offer in linked.ears.offers[0]] == ["blk"]
    session = Controls(priority=2, session=SessionStep("s", is_ordered=False))
    task = linked.run(1, 4.0)
    linked.run(2, 5.0, controls=session)
    await until(lambda: len(linked.ears.answers) == 2)
    for job_id, doubled in ((1, 8.0), (2, 10.0)):
        response = linked.ears.answers[job_id]
        assert isinstance(response, InferResponse)
        assert response.is_final
        assert to_array(response.outputs[0]).ravel().tolist() == [doubled]
        assert response.timing.batch_rows
    assert len(task.request.inputs) == 1  # whoever sends it again has them still
    linked.link.probe("blk")
    await until(lambda: linked.ears.probes == [("blk", "")])


async def test_what_is_not_here_goes_back_after_the_call(linked: Linked) -> None:
    linked.run(1, 1.0, "blk-other")
    await until(lambda: linked.ears.returned == [1])


async def test_what_has_not_run_can_be_had_back_or_be_cancelled(linked: Linked) -> None:
    linked.bed.engine.gate.clear()
    for job_id in range(1, 5):
        linked.run(job_id, 1.0)
    await asyncio.sleep(0)
    linked.link.cancel(4)
    linked.link.hand_back(linked.bed.runner.hand_back())
    linked.bed.engine.gate.set()
    await until(lambda: {*linked.ears.returned, *linked.ears.answers} >= {1, 2, 3})
    assert 4 not in linked.ears.answers
    assert 4 not in linked.ears.returned


async def test_a_door_that_closes_hears_nothing_more_and_its_jobs_end(linked: Linked) -> None:
    linked.bed.engine.gate.clear()
    linked.run(1, 1.0)
    linked.link.detach()
    linked.bed.engine.gate.set()
    await linked.bed.runner.drain()
    assert not linked.ears.answers
    assert not linked.link.is_in_use


async def test_it_shares_the_worker_with_others_for_as_long_as_somebody_comes(linked: Linked) -> None:
    assert (linked.link.is_in_use, linked.announced) == (False, 1)
    linked.run(1, 1.0)
    linked.run(2, 1.0)
    assert (linked.link.is_in_use, linked.announced) == (True, 2)
    linked.link.tick(time.monotonic() + 2 * IDLE_S)
    assert linked.link.is_in_use  # they run
    await until(lambda: len(linked.ears.answers) == 2)
    linked.link.tick(time.monotonic())
    assert linked.link.is_in_use
    linked.link.tick(time.monotonic() + 2 * IDLE_S)
    assert (linked.link.is_in_use, linked.announced) == (False, 3)
