"""A worker's link to the gateway in its own process: its door for clients that go direct."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.core.cluster.local import LocalEars, LocalOffer, LocalTask
from penstock.core.errors import PenstockError
from penstock.core.requests import PLAIN, InferResponse, SessionStep
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Tensor
from penstock.tasks.base import TaskRequest
from penstock.worker.job import Holder, WorkerJob

now = time.monotonic
IDLE_S = 10.0  # without a job, after which it counts no more


@dataclass(slots=True)
class LocalOwner:
    """What the link asks of its worker."""

    holder: Callable[[str], Holder | None]  # of a block's jobs; None: they go back
    offers: Callable[[], Sequence[LocalOffer]]
    statistics: Callable[[], Iterable[BlockStatistics]]
    probe: Callable[[str, Callable[[str], None]], None]  # of a block; told is what is wrong, or nothing
    wake: Callable[[str], None]  # a dormant block
    announce: Callable[[], None]  # each link's share of the credits is another now


class LocalLink:
    """A LocalWorker, as core.cluster.local has it. Used from the worker's event loop."""

    def __init__(self, worker_id: str, owner: LocalOwner) -> None:
        self.worker_id = worker_id
        self._owner = owner
        self._ears: LocalEars | None = None
        self._jobs: dict[int, tuple[WorkerJob, Holder]] = {}
        self._is_called = False  # by the door: it hears nothing before that is over
        self._used = 0.0  # when the last job came
        self.is_in_use = False  # it counts among those who share the worker

    def tick(self, now: float) -> None:
        """One that nobody comes to takes nothing from others."""
        if self.is_in_use and not self._jobs and now - self._used > IDLE_S:
            self.is_in_use = False
            self._owner.announce()

    # --- what the door asks

    def attach(self, ears: LocalEars) -> None:
        self._ears = ears
        self._owner.announce()

    def detach(self) -> None:
        self._ears = None
        abandoned = list(self._jobs.values())
        self._jobs.clear()
        for job, holder in abandoned:
            holder.cancel(job)
        self.is_in_use = False
        self._owner.announce()

    def run(self, task: LocalTask) -> None:
        holder = self._owner.holder(task.block_id)
        self._used = now()
        with self._called():
            if not self.is_in_use:
                self.is_in_use = True
                self._owner.announce()
            if holder is None or task.job_id in self._jobs:
                self._return([task.job_id])
                return
            job = self._job(task)
            self._jobs[job.job_id] = job, holder
            holder.accept(job)

    def cancel(self, job_id: int) -> None:
        if (linked := self._jobs.pop(job_id, None)) is not None:
            job, holder = linked
            holder.cancel(job)

    def recall(self, job_id: int) -> None:
        linked = self._jobs.get(job_id)
        with self._called():
            if linked is not None and linked[1].recall(linked[0]):
                self.hand_back([linked[0]])

    def allow(self, job_id: int, answers: int) -> None:
        if (linked := self._jobs.get(job_id)) is not None:
            job, holder = linked
            holder.allow(job, answers)

    def probe(self, block_id: str) -> None:
        self._owner.probe(block_id, lambda problem: self._soon(lambda ears: ears.probed(block_id, problem)))

    def wake(self, block_id: str) -> None:
        with self._called():
            self._owner.wake(block_id)

    def statistics(self) -> Iterable[BlockStatistics]:
        return self._owner.statistics()

    # --- what the worker tells

    def say_hello(self) -> None:
        """Tells what this worker holds now."""
        self._tell(lambda ears: ears.offered(self._owner.offers()))

    def hand_back(self, jobs: Iterable[WorkerJob]) -> None:
        mine = [job for job in jobs if (linked := self._jobs.get(job.job_id)) is not None and linked[0] is job]
        for job in mine:
            del self._jobs[job.job_id]
        if mine:
            self._return([job.job_id for job in mine])

    @contextmanager
    def _called(self) -> Iterator[None]:
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = False

    def _job(self, task: LocalTask) -> WorkerJob:
        request, controls = task.request, task.request.controls
        asked = TaskRequest(list(request.inputs), list(request.outputs), request.parameters)
        job = WorkerJob(
            task.job_id, task.attempt, asked, task.deadline, self._reply, request.request_id, request.traceparent
        )
        job.response_credits = task.answers_ahead
        if controls is not PLAIN:
            job.priority, job.queue_deadline = controls.priority, task.queue_deadline
            if controls.session is not None:
                job.session = SessionStep(controls.session.session_id)
        return job

    def _reply(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        linked = self._jobs.get(job.job_id)
        if linked is None or linked[0] is not job:
            return
        if not is_partial:
            del self._jobs[job.job_id]
        if isinstance(outcome, PenstockError):
            told: InferResponse | PenstockError = outcome
        else:
            parameters = dict(job.prepared.parameters) if job.prepared else {}
            told = InferResponse("", "", "", outcome, job.timing, parameters, not is_partial)
        self._tell(lambda ears: ears.answered(job.job_id, job.attempt, told))

    def _return(self, job_ids: list[int]) -> None:
        self._tell(lambda ears: ears.handed_back(job_ids))

    def _tell(self, say: Callable[[LocalEars], None]) -> None:
        if self._is_called:
            asyncio.get_running_loop().call_soon(self._soon, say)
        else:
            self._soon(say)

    def _soon(self, say: Callable[[LocalEars], None]) -> None:
        if self._ears is not None:
            say(self._ears)
