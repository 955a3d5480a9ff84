"""The job table: which jobs wait, which run where, and what happens to them. Decides; never acts.

A job is waiting (in its block's queue), running (on a worker that holds one of its credits) or gone.
Every method takes `now` and returns the actions that follow; same state and event, same actions.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from penstock.core.errors import DeadlineExceeded, PenstockError, QueueFull, WorkerLost
from penstock.core.requests import InferRequest
from penstock.router.policy import Candidates


@dataclass(slots=True)
class Job:
    job_id: int
    block_id: str
    request: InferRequest
    deadline: float
    is_idempotent: bool = True
    attempt: int = 0  # how often it was sent: a reply must name the newest
    losses: int = 0  # how many workers died with it
    slot: "Slot | None" = None  # where it runs
    is_gone: bool = False
    submitted: float = 0.0
    sent: float = 0.0


@dataclass(slots=True)
class Slot:
    """A block on a worker: how many jobs it may have, and those it has."""

    worker: bytes
    block_id: str
    credits: int
    jobs: dict[int, Job] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        return len(self.jobs)


@dataclass(slots=True)
class Queue:
    max_queue: int
    candidates: Candidates[Slot]
    slots: dict[bytes, Slot] = field(default_factory=dict)
    waiting: deque[Job] = field(default_factory=deque)
    length: int = 0  # of `waiting`, less the jobs that are gone


@dataclass(slots=True, frozen=True)
class Send:
    worker: bytes
    job: Job


@dataclass(slots=True, frozen=True)
class Fail:
    job: Job
    error: PenstockError


@dataclass(slots=True, frozen=True)
class CancelOn:
    worker: bytes
    job_id: int


@dataclass(slots=True, frozen=True)
class Retry:
    """For the counters: the job went back to its queue."""

    job: Job
    reason: str


Action = Send | Fail | CancelOn | Retry


class JobTable:
    def __init__(self, max_attempts: int, rng: Random) -> None:
        self._max_attempts = max_attempts
        self._rng = rng
        self._jobs: dict[int, Job] = {}
        self._queues: dict[str, Queue] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def queue_length(self, block_id: str) -> int:
        queue = self._queues.get(block_id)
        return queue.length if queue else 0

    def running(self, block_id: str) -> int:
        queue = self._queues.get(block_id)
        return sum(slot.in_flight for slot in queue.slots.values()) if queue else 0

    def blocks(self) -> list[str]:
        return list(self._queues)

    def declare(self, block_id: str, max_queue: int) -> None:
        """Makes the block's queue, so that jobs may wait for its first worker."""
        queue = self._queues.get(block_id)
        if queue is None:
            self._queues[block_id] = Queue(max_queue, Candidates(self._rng))
        else:
            queue.max_queue = max_queue

    def retire(self, block_id: str, error: PenstockError) -> list[Action]:
        """The block will get no worker any more: fails what waits for one."""
        queue = self._queues.get(block_id)
        if queue is None:
            return []
        waiting = [job for job in queue.waiting if not job.is_gone]
        queue.waiting.clear()
        queue.length = 0
        for job in waiting:
            self._forget(job)
        return [Fail(job, error) for job in waiting]

    def submit(self, job: Job, now: float) -> list[Action]:
        """Raises QueueFull, and then knows nothing of the job."""
        queue = self._queues[job.block_id]
        if queue.length >= queue.max_queue:
            raise QueueFull(f"{queue.length} requests wait for this block already (max_queue)", block=job.block_id)
        job.submitted = now
        self._jobs[job.job_id] = job
        self._watch_deadline(job)
        if queue.length == 0 and (slot := queue.candidates.choose()) is not None:
            return [self._assign(queue, slot, job, now)]
        queue.waiting.append(job)
        queue.length += 1
        return []

    def complete(self, worker: bytes, job_id: int, attempt: int, now: float) -> tuple[Job | None, list[Action]]:
        """The job that the reply answers, or None for a late or unknown one."""
        job = self._jobs.get(job_id)
        if job is None or job.slot is None or job.slot.worker != worker or job.attempt != attempt:
            return None, []
        queue = self._queues[job.block_id]
        self._release(queue, job)
        self._forget(job)
        return job, self._refill(queue, now) if queue.length else []

    def cancel(self, job_id: int, now: float) -> list[Action]:
        """The caller left: the job leaves the queue, or its worker is told."""
        job = self._jobs.get(job_id)
        return [] if job is None else self._drop(job, now)

    def join(self, worker: bytes, offers: Iterable[tuple[str, int]], now: float) -> list[Action]:
        """A worker said which blocks it holds, with how many credits; what it no longer offers takes no more."""
        offered = dict(offers)
        for block_id in offered:
            if block_id not in self._queues:
                raise KeyError(block_id)
        actions: list[Action] = []
        for block_id, queue in self._queues.items():
            slot = queue.slots.get(worker)
            credits = offered.get(block_id, 0)
            if slot is None:
                if not credits:
                    continue
                slot = queue.slots[worker] = Slot(worker, block_id, credits)
            slot.credits = credits
            self._offer(queue, slot)
            actions += self._refill(queue, now)
        return actions

    def leave(self, worker: bytes, now: float) -> list[Action]:
        """A worker is gone: what ran there goes back in front of its queue, where it may run again."""
        actions: list[Action] = []
        for queue in self._queues.values():
            slot = queue.slots.pop(worker, None)
            if slot is None:
                continue
            queue.candidates.remove(slot)
            actions += [self._lose(queue, job) for job in reversed(list(slot.jobs.values()))]
            actions += self._refill(queue, now)
        return actions

    def hand_back(self, worker: bytes, job_ids: Iterable[int], now: float) -> list[Action]:
        """A worker returns jobs that it did not start: they did not cost an attempt."""
        actions: list[Action] = []
        touched: set[str] = set()
        for job_id in reversed(list(job_ids)):
            job = self._jobs.get(job_id)
            if job is None or job.slot is None or job.slot.worker != worker:
                continue
            queue = self._queues[job.block_id]
            self._release(queue, job)
            self._requeue(queue, job)
            touched.add(job.block_id)
            actions.append(Retry(job, "handed_back"))
        for block_id in touched:
            actions += self._refill(self._queues[block_id], now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fails what is past its deadline."""
        actions: list[Action] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, job_id = heapq.heappop(self._deadlines)
            job = self._jobs.get(job_id)
            if job is not None:
                where = "running" if job.slot else "waiting"
                actions += self._drop(job, now)
                actions.append(Fail(job, DeadlineExceeded(f"the deadline passed while the request was {where}")))
        return actions

    def _assign(self, queue: Queue, slot: Slot, job: Job, now: float) -> Send:
        job.slot, job.sent = slot, now
        job.attempt += 1
        slot.jobs[job.job_id] = job
        if len(slot.jobs) >= slot.credits:
            queue.candidates.remove(slot)
        return Send(slot.worker, job)

    def _refill(self, queue: Queue, now: float) -> list[Action]:
        actions: list[Action] = []
        while queue.length and (slot := queue.candidates.choose()) is not None:
            job = queue.waiting.popleft()
            if job.is_gone:
                continue
            queue.length -= 1
            actions.append(self._assign(queue, slot, job, now))
        return actions

    def _offer(self, queue: Queue, slot: Slot) -> None:
        if len(slot.jobs) < slot.credits:
            queue.candidates.add(slot)
        else:
            queue.candidates.remove(slot)

    def _release(self, queue: Queue, job: Job) -> None:
        slot = job.slot
        assert slot is not None, f"job {job.job_id} holds no credit"
        job.slot = None
        del slot.jobs[job.job_id]
        self._offer(queue, slot)

    def _requeue(self, queue: Queue, job: Job) -> None:
        queue.waiting.appendleft(job)
        queue.length += 1

    def _lose(self, queue: Queue, job: Job) -> Action:
        job.slot = None
        if not job.is_idempotent:
            self._forget(job)
            return Fail(job, WorkerLost("the worker died, and this model must not run a request twice"))
        job.losses += 1
        if job.losses >= self._max_attempts:
            self._forget(job)
            return Fail(job, WorkerLost(f"{job.losses} workers died while they ran this request"))
        self._requeue(queue, job)
        return Retry(job, "worker_lost")

    def _drop(self, job: Job, now: float) -> list[Action]:
        queue = self._queues[job.block_id]
        self._forget(job)
        if job.slot is None:
            queue.length -= 1
            if len(queue.waiting) > 2 * queue.length + 64:
                queue.waiting = deque(job for job in queue.waiting if not job.is_gone)
            return []
        worker = job.slot.worker
        self._release(queue, job)
        return [CancelOn(worker, job.job_id), *self._refill(queue, now)]

    def _watch_deadline(self, job: Job) -> None:
        heapq.heappush(self._deadlines, (job.deadline, job.job_id))
        if len(self._deadlines) > 4 * len(self._jobs) + 1000:
            self._deadlines = [(job.deadline, job.job_id) for job in self._jobs.values()]
            heapq.heapify(self._deadlines)

    def _forget(self, job: Job) -> None:
        job.is_gone = True
        del self._jobs[job.job_id]
