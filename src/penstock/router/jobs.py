"""The job table: which jobs wait, which run where, and what happens to them. Decides; never acts.

A job is waiting (in one of its block's lines), running (on a worker that holds one of its credits) or gone.
A job with a key or a session belongs to one worker and waits for that one; any other takes the first that is free.
Every method takes `now` and returns the actions that follow; same state and event, same actions.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import inf

from penstock.core.errors import DeadlineExceeded, PenstockError, QueueTimeout, WorkerLost
from penstock.router.actions import Action, CancelOn, FailJob, Retry
from penstock.router.deadlines import JobDeadlines
from penstock.router.ejections import Ejections
from penstock.router.health import TIMEOUT
from penstock.router.policies.policy import Draw
from penstock.router.queues import BlockRules, Queue, homes
from penstock.router.slots import BlockActivity, Job, Offer, Slot, SlotStanding

LATE_S = 0.1  # a failure so short before the deadline is that of a model which did not answer in time
UNANSWERED = frozenset({DeadlineExceeded.code, QueueTimeout.code})  # a worker says so, but has no answer


class JobTable:
    def __init__(self, max_attempts: int, draw: Draw) -> None:
        self._max_attempts = max_attempts
        self._draw = draw
        self._jobs: dict[int, Job] = {}
        self._queues: dict[str, Queue] = {}
        self._ejections = Ejections()
        self._deadlines = JobDeadlines(self._jobs, lambda job, when: True)
        self._queue_deadlines = JobDeadlines(self._jobs, _may_time_out)
        self._switched: dict[str, None] = {}  # blocks that have got other rules since the last tick

    def __len__(self) -> int:
        return len(self._jobs)

    # --- what is asked

    def lengths(self) -> dict[str, tuple[int, int]]:
        """How many jobs wait and how many run, by block."""
        return {
            block_id: (queue.length, sum(slot.in_flight for slot in queue.slots.values()))
            for block_id, queue in self._queues.items()
        }

    def activities(self) -> dict[str, BlockActivity]:
        return {
            block_id: BlockActivity(
                queue.length + sum(slot.in_flight for slot in queue.slots.values()),
                queue.length,
                queue.unanswered,
                max((slot.heard for slot in queue.slots.values()), default=0.0),
                max((slot.latency_s for slot in queue.slots.values()), default=0.0),
                queue.rules.health.unanswered_s,
            )
            for block_id, queue in self._queues.items()
        }

    def standing(self, block_id: str, now: float) -> list[SlotStanding]:
        queue = self._queues.get(block_id)
        return [slot.standing(now) for slot in queue.slots.values()] if queue else []

    def owner(self, block_id: str, key: str) -> bytes | None:
        """The worker that jobs with this key, or of this session, go to."""
        queue = self._queues.get(block_id)
        slot = queue.places.owner(key) if queue else None
        return slot.worker if slot else None

    # --- blocks

    def declare(self, block_id: str, rules: BlockRules) -> None:
        """Makes the block's queue, so that jobs may wait for its first worker, or gives it other rules from now on.

        What other rules allow to be sent goes with the next tick.
        """
        queue = self._queues.get(block_id)
        if queue is None:
            self._queues[block_id] = Queue(rules, self._draw)
        elif rules != queue.rules:
            if queue.adopt(rules, self._draw):
                queue.move(queue.drain_all())
            self._switched[block_id] = None

    def retire(self, blocks: Mapping[str, PenstockError]) -> list[Action]:
        """Nobody else asks these blocks, and no others are retired: what waits is run by the workers that have them
        still, and fails with the last of those."""
        actions: list[Action] = []
        for block_id, queue in self._queues.items():
            queue.retired = blocks.get(block_id)
            actions += self._fail_stranded(queue)
        return actions

    # --- jobs

    def submit(self, job: Job, now: float) -> list[Action]:
        """Raises QueueFull, InvalidRequest where a key is missing, or WorkerLost where only one worker that is gone
        could run it, and then knows nothing of the job."""
        queue = self._queues[job.block_id]
        if queue.is_hashed or job.session:
            if queue.has_lost_home(job):
                raise _homeless()
            line, slot = queue.seek(job, now)
        else:
            line = queue.line
            slot = None if line.length else queue.policy.choose(now)
        job.submitted = now
        actions: list[Action] = []
        if slot is not None:
            actions.append(queue.assign(slot, job, now))
        else:
            queue.check_room(job)
            queue.wait(line, job)
            if queue.recalls is not None:
                actions += queue.recall([job])
            if job.queue_deadline < inf:
                self._queue_deadlines.watch(job.queue_deadline, job.job_id)
        self._jobs[job.job_id] = job
        self._deadlines.watch(job.deadline, job.job_id)
        return actions

    def complete(
        self, worker: bytes, job_id: int, attempt: int, now: float, code: str = "", message: str = ""
    ) -> tuple[Job | None, list[Action]]:
        """The job that the reply answers, with its session's home, or None for a late or unknown one.

        `code` is that of a failure.
        """
        job = self._jobs.get(job_id)
        if job is None or (slot := job.slot) is None or slot.worker != worker or job.attempt != attempt:
            return None, []
        queue = self._queues[job.block_id]
        del self._jobs[job_id]
        queue.release(slot, job)
        if code:
            if code in UNANSWERED or now > job.deadline - LATE_S:
                queue.unanswered += 1
            else:
                slot.heard = now
            actions = self._ejections.judge(queue, slot, code, message, now) + self._fail_orphans(queue)
        else:
            actions = []
            slot.measure(now - job.sent, now)
            slot.heard = now
            if slot.condition is not None and not slot.is_ejected:
                slot.condition = None
        job.home = worker
        if queue.length:
            actions += queue.hand_on(slot, now)
        elif not slot.is_listed or queue.policy.is_counting:
            queue.review(slot)
        return job, actions

    def partial(self, worker: bytes, job_id: int, attempt: int, now: float) -> Job | None:
        """The job that one of several answers belongs to, or None for a late or unknown one."""
        job = self._jobs.get(job_id)
        if job is None or job.slot is None or job.slot.worker != worker or job.attempt != attempt:
            return None
        job.slot.heard = now
        return job

    def cancel(self, job_id: int, now: float) -> list[Action]:
        """The caller left: the job leaves the queue, or its worker is told."""
        job = self._jobs.get(job_id)
        slot = None if job is None else self._drop(job)
        if slot is None:
            return []
        return [CancelOn(slot.worker, job_id), *self._queues[slot.block_id].hand_on(slot, now)]

    # --- workers

    def join(self, worker: bytes, offers: Iterable[Offer], now: float) -> list[Action]:
        """A worker said which blocks it holds, with how many credits; what it no longer offers takes no more."""
        offered = {offer.block_id: offer for offer in offers}
        for block_id in offered:
            if block_id not in self._queues:
                raise KeyError(block_id)
        actions: list[Action] = []
        for block_id, queue in self._queues.items():
            slot, offer = queue.slots.get(worker), offered.get(block_id)
            if offer is not None and offer.credits:
                if slot is None:
                    slot = queue.slots[worker] = Slot(worker, block_id, 0, offer.name or worker.hex())
                queue.grant(slot, offer)
                actions += queue.hand_on(slot, now)
            elif slot is not None and slot.credits:
                actions += self._withdraw(queue, slot, (), now)
        return actions

    def leave(self, worker: bytes, now: float) -> list[Action]:
        """A worker is gone: what ran there goes back in front of its queue, where it may run again."""
        actions: list[Action] = []
        for queue in self._queues.values():
            slot = queue.slots.pop(worker, None)
            if slot is not None:
                actions += self._withdraw(queue, slot, list(slot.jobs.values()), now)
        return actions

    def hand_back(self, worker: bytes, job_ids: Iterable[int], now: float) -> list[Action]:
        """A worker returns jobs that it did not start, unasked or asked: they did not cost an attempt."""
        actions: list[Action] = []
        touched: dict[str, list[Slot]] = {}
        for job_id in reversed(list(job_ids)):
            job = self._jobs.get(job_id)
            if job is None or (slot := job.slot) is None or slot.worker != worker:
                continue
            queue = self._queues[job.block_id]
            is_recalled = queue.recalls is not None and queue.recalls.gone(job)
            queue.release(slot, job)
            queue.review(slot)
            queue.move([job], is_first=True)
            if job.queue_deadline < inf:
                self._queue_deadlines.watch(job.queue_deadline, job.job_id)
            touched.setdefault(job.block_id, []).extend([slot, *homes([job])])
            actions.append(Retry(job, "recalled" if is_recalled else "handed_back"))
        for block_id, slots in touched.items():
            queue = self._queues[block_id]
            actions += self._fail_orphans(queue) + queue.spread(slots, now) + self._fail_stranded(queue)
        return actions

    def probed(self, worker: bytes, block_id: str, problem: str, now: float, is_idle: bool = False) -> list[Action]:
        """A worker answered a probe; an empty problem says that the block works.

        Where jobs wait here for a worker that has none (`is_idle`), that does not help them.
        """
        queue = self._queues.get(block_id)
        slot = queue.slots.get(worker) if queue else None
        if queue and slot and not problem and not (queue.length and is_idle):
            slot.heard = now
        return self._ejections.probed(queue, worker, problem, now) if queue else []

    # --- time

    def tick(self, now: float) -> list[Action]:
        """Fails what is past its deadline or waited too long, sends probes, and what other rules allow to be sent."""
        actions: list[Action] = []
        freed: list[Slot] = []
        while (job := self._deadlines.pop(now)) is not None:
            where = "running" if job.slot else "waiting"
            slot = self._drop(job)
            if slot is not None:
                slot.measure(now - job.sent, now)
                freed.append(slot)
                actions.append(CancelOn(slot.worker, job.job_id))
            actions.append(FailJob(job, DeadlineExceeded(f"the deadline passed while the request was {where}")))
        while (job := self._queue_deadlines.pop(now)) is not None:
            actions += self._time_out(job, now)
        # Only now, so that nothing is sent that has just failed.
        for slot in freed:
            queue = self._queues[slot.block_id]
            actions += self._ejections.judge(queue, slot, TIMEOUT, "", now) + self._fail_orphans(queue)
            actions += queue.hand_on(slot, now)
        while self._switched:
            queue = self._queues[self._switched.popitem()[0]]
            actions += self._ejections.relieve(queue, now) + self._fail_orphans(queue)
            actions += queue.spread(queue.slots.values(), now)
        return actions + self._ejections.tick(now)

    def _time_out(self, job: Job, now: float) -> list[Action]:
        queue = self._queues[job.block_id]
        if queue.rules.priorities.policy(job.priority).on_timeout == "delay":
            queue.delay(job)
            return []
        self._drop(job)
        said = f"no worker was free for it in {now - job.submitted:.3f} s, and it may wait no longer (queue timeout)"
        return [FailJob(job, QueueTimeout(said, block=job.block_id))]

    # --- what the above is made of

    def _drop(self, job: Job) -> Slot | None:
        """The job is gone; returns the slot that ran it, whose credit has to be handed on."""
        queue = self._queues[job.block_id]
        queue.unanswered += 1
        slot = job.slot
        del self._jobs[job.job_id]
        if slot is None:
            queue.take_out(job)
        else:
            queue.release(slot, job)
        return slot

    def _withdraw(self, queue: Queue, slot: Slot, lost: Sequence[Job], now: float) -> list[Action]:
        """It takes no more jobs: what waits for it, and what was lost with it, goes elsewhere."""
        waiting = queue.drain(slot.line)
        queue.withdraw(slot)
        actions = self._ejections.relieve(queue, now)
        queue.move(waiting)
        actions += [self._lose(queue, job) for job in reversed(lost)]
        actions += self._fail_orphans(queue)
        actions += queue.spread(homes([*waiting, *lost]), now) + self._fail_stranded(queue)
        return actions + queue.recall(lost)

    def _fail_orphans(self, queue: Queue) -> list[Action]:
        orphans, queue.orphans = queue.orphans, []
        for job in orphans:
            del self._jobs[job.job_id]
        return [FailJob(job, _homeless()) for job in orphans]

    def _fail_stranded(self, queue: Queue) -> list[Action]:
        if queue.retired is None or not queue.is_stranded:
            return []
        stranded = queue.drain_all()
        for job in stranded:
            del self._jobs[job.job_id]
        return [FailJob(job, copy(queue.retired)) for job in stranded]

    def _lose(self, queue: Queue, job: Job) -> Action:
        job.slot = None
        if queue.recalls is not None:
            queue.recalls.gone(job)
        job.losses += 1
        if job.is_idempotent and not job.has_answered and job.losses < self._max_attempts:
            job.queue_deadline = inf  # it had left its queue in time
            queue.move([job], is_first=True)
            return Retry(job, "worker_lost")
        del self._jobs[job.job_id]
        if job.has_answered:
            return FailJob(job, WorkerLost("the worker died in the midst of its answer, which no other goes on with"))
        if not job.is_idempotent:
            return FailJob(job, WorkerLost("the worker died, and this model must not run a request twice"))
        return FailJob(job, WorkerLost(f"{job.losses} workers died while they ran this request"))


def _homeless() -> WorkerLost:
    return WorkerLost("the worker that had the session's state is gone; nothing was run")


def _may_time_out(job: Job, when: float) -> bool:
    return job.line is not None and not job.is_delayed and job.queue_deadline == when
