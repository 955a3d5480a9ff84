"""A worker's link to its direct endpoint, which is a gateway in the worker's process."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from penstock.core.cluster.local_worker import LocalOffer, LocalReceiver, LocalTask
from penstock.core.errors import PenstockError
from penstock.core.requests import NO_CONTROLS, InferResponse, SessionStep
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Tensor
from penstock.tasks.base import TaskRequest
from penstock.worker.worker_job import Holder, Holders, WorkerJob

now = time.monotonic
IDLE_S = 10.0  # time without a job after which other links get this link's share of the credits


class LocalOwner(Protocol):
    """The methods that a `LocalLink` calls on its worker."""

    @property
    def blocks(self) -> Holders: ...

    def local_offers(self) -> Sequence[LocalOffer]: ...

    def announce(self) -> None:
        """Send every gateway the worker's blocks again, because each link's share of the credits has changed."""
        ...


class LocalLink:
    """Passes jobs from the direct endpoint to the worker's blocks, and results back; implements LocalWorker.

    Call all methods on the worker's event loop.
    """

    def __init__(self, worker_id: str, owner: LocalOwner) -> None:
        self.worker_id = worker_id
        self._owner = owner
        self._blocks = owner.blocks
        self._receiver: LocalReceiver | None = None
        self._jobs: dict[int, tuple[WorkerJob, Holder]] = {}
        self._is_called = (
            False  # true while the endpoint calls this link: the call must return before the endpoint receives results
        )
        self._last_used = 0.0  # when the last job arrived
        self.is_in_use = False  # whether the link has a share of the credits

    def tick(self, now: float) -> None:
        """After `IDLE_S` without jobs, release this link's share of the credits to the other links."""
        if self.is_in_use and not self._jobs and now - self._last_used > IDLE_S:
            self.is_in_use = False
            self._owner.announce()

    # --- calls of the direct endpoint

    def attach(self, receiver: LocalReceiver) -> None:
        self._receiver = receiver
        self._owner.announce()

    def detach(self) -> None:
        self._receiver = None
        abandoned = list(self._jobs.values())
        self._jobs.clear()
        for job, holder in abandoned:
            holder.cancel(job)
        self.is_in_use = False
        self._owner.announce()

    def run(self, task: LocalTask) -> None:
        holder = self._blocks.holder(task.block_id)
        self._last_used = now()
        with self._defer_notices():
            if not self.is_in_use:
                self.is_in_use = True
                self._owner.announce()
            if holder is None or task.job_id in self._jobs:
                self._return_jobs([task.job_id])
                return
            job = self._build_job(task)
            self._jobs[job.job_id] = job, holder
            holder.accept(job)

    def cancel(self, job_id: int) -> None:
        if (linked := self._jobs.pop(job_id, None)) is not None:
            job, holder = linked
            holder.cancel(job)

    def recall(self, job_id: int) -> None:
        linked = self._jobs.get(job_id)
        with self._defer_notices():
            if linked is not None and linked[1].recall(linked[0]):
                self.hand_back([linked[0]])

    def allow(self, job_id: int, answers: int) -> None:
        if (linked := self._jobs.get(job_id)) is not None:
            job, holder = linked
            holder.allow(job, answers)

    def probe(self, block_id: str) -> None:
        self._blocks.probe(
            block_id,
            lambda problem: self._send_notice(lambda receiver: receiver.receive_probe_result(block_id, problem)),
        )

    def wake(self, block_id: str) -> None:
        with self._defer_notices():
            self._blocks.wake(block_id)

    def collect_statistics(self) -> Iterable[BlockStatistics]:
        return self._blocks.statistics()

    # --- messages of the worker

    def say_hello(self) -> None:
        """Send the direct endpoint the worker's current blocks."""
        self._notify(lambda receiver: receiver.receive_offers(self._owner.local_offers()))

    def hand_back(self, jobs: Iterable[WorkerJob]) -> None:
        mine = [job for job in jobs if (linked := self._jobs.get(job.job_id)) is not None and linked[0] is job]
        for job in mine:
            del self._jobs[job.job_id]
        if mine:
            self._return_jobs([job.job_id for job in mine])

    @contextmanager
    def _defer_notices(self) -> Iterator[None]:
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = False

    def _build_job(self, task: LocalTask) -> WorkerJob:
        request, controls = task.request, task.request.controls
        asked = TaskRequest(list(request.inputs), list(request.outputs), request.parameters)
        job = WorkerJob(
            task.job_id, task.attempt, asked, task.deadline, self._reply, request.request_id, request.traceparent
        )
        job.response_credits = task.answers_ahead
        if controls is not NO_CONTROLS:
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
            result: InferResponse | PenstockError = outcome
        else:
            parameters = dict(job.prepared.parameters) if job.prepared else {}
            result = InferResponse("", "", "", outcome, job.timing, parameters, not is_partial)
        self._notify(lambda receiver: receiver.receive_answer(job.job_id, job.attempt, result))

    def _return_jobs(self, job_ids: list[int]) -> None:
        self._notify(lambda receiver: receiver.take_back_jobs(job_ids))

    def _notify(self, notice: Callable[[LocalReceiver], None]) -> None:
        if self._is_called:
            asyncio.get_running_loop().call_soon(self._send_notice, notice)
        else:
            self._send_notice(notice)

    def _send_notice(self, notice: Callable[[LocalReceiver], None]) -> None:
        if self._receiver is not None:
            notice(self._receiver)
