"""The job table: the waiting jobs, and the running jobs by worker. Pure: no I/O.

A job waits in one of its block's lines, runs on a slot (and uses one of the worker's credits), or is not in the table.
A job with a key or a session belongs to one slot and waits for that slot; any other job goes to the first free slot.
If no worker has a block, the block's jobs wait if a worker is expected to load it soon; otherwise they are refused.
Event methods take `now` and return the actions to perform; the same state and event give the same actions.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import inf

from penstock.core.errors import DeadlineExceeded, PenstockError, QueueTimeout, WorkerLost
from penstock.router.actions import Action, CancelJob, CountRetry, FailJob
from penstock.router.deadlines import Deadlines
from penstock.router.ejections import Ejections
from penstock.router.health import TIMEOUT_CODE
from penstock.router.policies.policy import RandomNumber
from penstock.router.queues import BlockRules, Queue, create_no_worker_error, list_awaited_slots
from penstock.router.slots import BlockActivity, Job, Offer, Slot, SlotState

MAX_ATTEMPTS = 3  # of a request whose workers die; the limit bounds how many workers a harmful request can kill
MOVE_TIMEOUT_S = 10.0  # for the manager to place a block on another worker after its last worker was lost
DEADLINE_MARGIN_S = 0.1  # a failure this shortly before the deadline counts as no answer in time
UNANSWERED_CODES = frozenset(
    {DeadlineExceeded.code, QueueTimeout.code}
)  # failures that do not count as answers of a worker


class JobTable:
    def __init__(self, draw: RandomNumber, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._max_attempts = max_attempts
        self._draw = draw
        self._jobs: dict[int, Job] = {}
        self._queues: dict[str, Queue] = {}
        self._ejections = Ejections()
        self._deadlines = Deadlines[int](lambda job_id, when: job_id in self._jobs)
        self._queue_deadlines = Deadlines[int](self._has_queue_deadline)
        self._workers: set[bytes] = set()  # connected workers
        self._blocks_without_workers: dict[str, None] = {}  # blocks that had workers and have none now
        self._changed_rules: dict[str, None] = {}  # blocks whose rules changed since the last tick

    def __len__(self) -> int:
        return len(self._jobs)

    # --- queries

    def count_jobs(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of waiting and of running jobs, by block."""
        return {
            block_id: (queue.length, sum(slot.in_flight for slot in queue.slots.values()))
            for block_id, queue in self._queues.items()
        }

    def describe_activities(self) -> dict[str, BlockActivity]:
        return {
            block_id: BlockActivity(
                queue.length + sum(slot.in_flight for slot in queue.slots.values()),
                queue.length,
                queue.unanswered,
                max((slot.last_answer_at for slot in queue.slots.values()), default=0.0),
                max((slot.latency_s for slot in queue.slots.values()), default=0.0),
            )
            for block_id, queue in self._queues.items()
        }

    def list_slot_states(self, block_id: str, now: float) -> list[SlotState]:
        queue = self._queues.get(block_id)
        return [slot.describe_at(now) for slot in queue.slots.values()] if queue else []

    def find_owner(self, block_id: str, key: str) -> bytes | None:
        """Return the worker that runs the jobs with this key or session id."""
        queue = self._queues.get(block_id)
        slot = queue.key_owners.find_owner(key) if queue else None
        return slot.worker if slot else None

    # --- blocks

    def declare_block(self, block_id: str, rules: BlockRules) -> None:
        """Create the block's queue, so that jobs may wait for its first worker, or change the rules of its queue.

        Jobs that can be sent under the new rules are sent by the next tick.
        """
        queue = self._queues.get(block_id)
        if queue is None:
            self._queues[block_id] = Queue(rules, self._draw)
        elif rules != queue.rules:
            if queue.change_rules(rules, self._draw):
                queue.move(queue.drain_all())
            self._changed_rules[block_id] = None

    def retire_blocks(self, blocks: Mapping[str, PenstockError]) -> list[Action]:
        """Set the withdrawn blocks; the values are the errors for the jobs of each block.

        A block's waiting jobs run if a worker still has the block; otherwise these jobs fail.
        """
        actions: list[Action] = []
        for block_id, queue in self._queues.items():
            queue.retirement_error = blocks.get(block_id)
            actions += self._fail_stranded(queue)
        return actions

    # --- jobs

    def submit(self, job: Job, now: float) -> list[Action]:
        """Add a job, or raise an error without adding the job.

        Raise QueueFull if the queue is full, InvalidRequest if a required key is missing, WorkerLost if only a lost
        worker could run the job, or ModelNotReady if no worker has the block and no worker is expected to load it soon.
        """
        queue = self._queues[job.block_id]
        if queue.is_hashed or job.session:
            if queue.has_lost_home(job):
                raise _create_lost_session_error()
            line, slot = queue.find_line(job, now)
        else:
            line = queue.line
            slot = None if line.length else queue.policy.choose(now)
        job.submitted_at = now
        actions: list[Action] = []
        if slot is not None:
            actions.append(queue.assign(slot, job, now))
        else:
            queue.check_room(job, now)
            queue.add_waiting(line, job)
            if queue.recalls is not None:
                actions += queue.recall([job])
            if job.queue_deadline < inf:
                self._queue_deadlines.add(job.queue_deadline, job.job_id)
        self._jobs[job.job_id] = job
        self._deadlines.add(job.deadline, job.job_id)
        return actions

    def complete(
        self, worker: bytes, job_id: int, attempt: int, now: float, code: str = "", message: str = ""
    ) -> tuple[Job | None, list[Action]]:
        """Complete a job with its worker's final reply; return the job, or None if the reply is late or unexpected.

        `code` and `message` describe a failure; an empty code is a success. `job.home` is set to the worker.
        """
        job = self._jobs.get(job_id)
        if job is None or (slot := job.slot) is None or slot.worker != worker or job.attempt != attempt:
            return None, []
        queue = self._queues[job.block_id]
        del self._jobs[job_id]
        queue.release(slot, job)
        if code:
            if code in UNANSWERED_CODES or now > job.deadline - DEADLINE_MARGIN_S:
                queue.unanswered += 1
            else:
                slot.last_answer_at = now
            actions = self._ejections.record_failure(queue, slot, code, message, now) + self._fail_orphans(queue)
        else:
            actions = []
            slot.record_latency(now - job.sent, now)
            slot.last_answer_at = now
            if slot.recent_failures is not None and not slot.is_ejected:
                slot.recent_failures = None
        job.home = worker
        if queue.length:
            actions += queue.assign_waiting(slot, now)
        elif not slot.is_listed or queue.policy.is_tracking_job_counts:
            queue.update_policy(slot)
        return job, actions

    def find_for_partial(self, worker: bytes, job_id: int, attempt: int, now: float) -> Job | None:
        """Return the job to which a partial answer belongs, or None if the answer is late or the job unknown."""
        job = self._jobs.get(job_id)
        if job is None or job.slot is None or job.slot.worker != worker or job.attempt != attempt:
            return None
        job.slot.last_answer_at = now
        return job

    def cancel(self, job_id: int, now: float) -> list[Action]:
        """Remove a job whose caller disconnected; if the job is running, cancel it on its worker."""
        job = self._jobs.get(job_id)
        slot = None if job is None else self._remove_job(job)
        if slot is None:
            return []
        return [CancelJob(slot.worker, job_id), *self._queues[slot.block_id].assign_waiting(slot, now)]

    # --- workers

    def join(self, worker: bytes, offers: Iterable[Offer], now: float) -> list[Action]:
        """Set the blocks that a worker offers, with the jobs that it accepts; its other blocks get no more jobs."""
        offered = {offer.block_id: offer for offer in offers}
        for block_id in offered:
            if block_id not in self._queues:
                raise KeyError(block_id)
        self._workers.add(worker)
        actions: list[Action] = []
        for block_id, queue in self._queues.items():
            slot, offer = queue.slots.get(worker), offered.get(block_id)
            if offer is not None and offer.credits:
                if slot is None:
                    slot = queue.slots[worker] = Slot(worker, block_id, 0, offer.name or worker.hex())
                queue.add_credits(slot, offer)
                self._blocks_without_workers.pop(block_id, None)
                actions += queue.assign_waiting(slot, now)
            elif slot is not None and slot.credits:
                actions += self._withdraw(queue, slot, (), now, queue.rules.max_waiting_s)
        return actions

    def leave(self, worker: bytes, now: float, is_expected_back: bool = True) -> list[Action]:
        """Remove a lost worker; the worker's running jobs return to the front of their queues or fail.

        If no other worker has a block, the block's jobs wait for this worker if `is_expected_back`, or else until the
        manager places the block on another connected worker. If no worker is connected, the jobs are refused.
        """
        self._workers.discard(worker)
        actions: list[Action] = []
        for queue in self._queues.values():
            slot = queue.slots.pop(worker, None)
            if slot is not None:
                wait_s = queue.rules.max_waiting_s if is_expected_back else MOVE_TIMEOUT_S if self._workers else 0.0
                actions += self._withdraw(queue, slot, list(slot.jobs.values()), now, wait_s)
        return actions

    def hand_back(self, worker: bytes, job_ids: Iterable[int], now: float) -> list[Action]:
        """Queue again the jobs that a worker returned before starting them; the return does not count as an attempt."""
        actions: list[Action] = []
        touched: dict[str, list[Slot]] = {}
        for job_id in reversed(list(job_ids)):
            job = self._jobs.get(job_id)
            if job is None or (slot := job.slot) is None or slot.worker != worker:
                continue
            queue = self._queues[job.block_id]
            is_recalled = queue.recalls is not None and queue.recalls.forget(job)
            queue.release(slot, job)
            queue.update_policy(slot)
            queue.move([job], is_first=True)
            if job.queue_deadline < inf:
                self._queue_deadlines.add(job.queue_deadline, job.job_id)
            touched.setdefault(job.block_id, []).extend([slot, *list_awaited_slots([job])])
            actions.append(CountRetry(job, "recalled" if is_recalled else "handed_back"))
        for block_id, slots in touched.items():
            queue = self._queues[block_id]
            actions += self._fail_orphans(queue) + queue.assign_all_waiting(slots, now) + self._fail_stranded(queue)
        return actions

    def receive_probe_result(
        self, worker: bytes, block_id: str, problem: str, now: float, is_idle: bool = False
    ) -> list[Action]:
        """Handle a worker's answer to a probe; an empty `problem` means that the block works.

        `is_idle`: the worker reports that it runs no job. If jobs of the block wait although the worker is idle, a
        success does not count as an answer of the worker.
        """
        queue = self._queues.get(block_id)
        slot = queue.slots.get(worker) if queue else None
        if queue and slot and not problem and not (queue.length and is_idle):
            slot.last_answer_at = now
        return self._ejections.receive_probe_result(queue, worker, problem, now) if queue else []

    # --- time

    def tick(self, now: float) -> list[Action]:
        """Fail jobs past their deadlines, send due probes, and send the jobs that changed rules now allow."""
        actions: list[Action] = []
        freed: list[Slot] = []
        while (job_id := self._deadlines.pop(now)) is not None:
            job = self._jobs[job_id]
            where = "running" if job.slot else "waiting"
            slot = self._remove_job(job)
            if slot is not None:
                slot.record_latency(now - job.sent, now)
                freed.append(slot)
                actions.append(CancelJob(slot.worker, job.job_id))
            actions.append(FailJob(job, DeadlineExceeded(f"the deadline passed while the request was {where}")))
        while (job_id := self._queue_deadlines.pop(now)) is not None:
            actions += self._fail_or_delay(self._jobs[job_id], now)
        # Freed credits are assigned after all expired jobs are removed, so that no expired job gets one.
        for slot in freed:
            queue = self._queues[slot.block_id]
            actions += self._ejections.record_failure(queue, slot, TIMEOUT_CODE, "", now) + self._fail_orphans(queue)
            actions += queue.assign_waiting(slot, now)
        while self._changed_rules:
            queue = self._queues[self._changed_rules.popitem()[0]]
            actions += self._ejections.restore_excess(queue, now) + self._fail_orphans(queue)
            actions += queue.assign_all_waiting(queue.slots.values(), now)
        for queue in [self._queues[block_id] for block_id in self._blocks_without_workers]:
            if queue.length and now >= queue.waits_until:
                actions += self._refuse_waiting(queue)
        return actions + self._ejections.tick(now)

    def _has_queue_deadline(self, job_id: int, when: float) -> bool:
        job = self._jobs.get(job_id)
        return job is not None and job.line is not None and not job.is_delayed and job.queue_deadline == when

    def _fail_or_delay(self, job: Job, now: float) -> list[Action]:
        queue = self._queues[job.block_id]
        if queue.rules.priorities.policy(job.priority).on_timeout == "delay":
            queue.delay(job)
            return []
        self._remove_job(job)
        message = f"no worker was free within the queue timeout ({now - job.submitted_at:.3f} s); try again later"
        return [FailJob(job, QueueTimeout(message, block=job.block_id))]

    # --- internals

    def _remove_job(self, job: Job) -> Slot | None:
        """Remove an unanswered job; return the slot that ran it, to which the caller must assign a waiting job."""
        queue = self._queues[job.block_id]
        queue.unanswered += 1
        slot = job.slot
        del self._jobs[job.job_id]
        if slot is None:
            queue.remove_waiting(job)
        else:
            queue.release(slot, job)
        return slot

    def _withdraw(self, queue: Queue, slot: Slot, lost: Sequence[Job], now: float, wait_s: float) -> list[Action]:
        """Stop sending jobs to the slot; queue its waiting jobs and the `lost` jobs for other slots.

        If the block has no other slot, the jobs wait at most `wait_s` for a new slot.
        """
        waiting = queue.drain(slot.line)
        queue.remove_slot(slot)
        if not queue.has_slots:
            queue.waits_until = min(queue.waits_until, now + wait_s)
            self._blocks_without_workers[slot.block_id] = None
        actions = self._ejections.restore_excess(queue, now)
        queue.move(waiting)
        actions += [self._requeue_or_fail(queue, job) for job in reversed(lost)]
        actions += self._fail_orphans(queue)
        actions += queue.assign_all_waiting(list_awaited_slots([*waiting, *lost]), now) + self._fail_stranded(queue)
        return actions + queue.recall(lost)

    def _fail_orphans(self, queue: Queue) -> list[Action]:
        homeless, queue.jobs_without_worker = queue.jobs_without_worker, []
        for job in homeless:
            del self._jobs[job.job_id]
        return [FailJob(job, _create_lost_session_error()) for job in homeless]

    def _fail_stranded(self, queue: Queue) -> list[Action]:
        if queue.retirement_error is None or not queue.is_stranded:
            return []
        stranded = queue.drain_all()
        for job in stranded:
            del self._jobs[job.job_id]
        return [FailJob(job, copy(queue.retirement_error)) for job in stranded]

    def _refuse_waiting(self, queue: Queue) -> list[Action]:
        """Fail the waiting jobs of a block that no worker has; a job that ran on a lost worker may have completed."""
        jobs = queue.drain_all()
        for job in jobs:
            del self._jobs[job.job_id]
        gone = "the worker died while it ran the request, and this gateway reaches no other worker that has the model"
        return [FailJob(job, WorkerLost(gone) if job.losses else create_no_worker_error(job)) for job in jobs]

    def _requeue_or_fail(self, queue: Queue, job: Job) -> Action:
        job.slot = None
        if queue.recalls is not None:
            queue.recalls.forget(job)
        job.losses += 1
        if job.is_idempotent and not job.has_answered and job.losses < self._max_attempts:
            job.queue_deadline = inf  # the job already left its queue in time
            queue.move([job], is_first=True)
            return CountRetry(job, "worker_lost")
        del self._jobs[job.job_id]
        if job.has_answered:
            return FailJob(job, WorkerLost("the worker died while streaming; a partial answer cannot be resumed"))
        if not job.is_idempotent:
            message = "the worker died while it ran the request, and this model must not run a request twice"
            return FailJob(job, WorkerLost(message))
        return FailJob(job, WorkerLost(f"{job.losses} workers died while they ran this request"))


def _create_lost_session_error() -> WorkerLost:
    return WorkerLost("the worker that had the session's state is gone; the request was not run")
