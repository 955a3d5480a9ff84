"""A block in the job table: the block's slots, the policy that chooses a slot, and the lines in which jobs wait."""

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from penstock.core.errors import InvalidRequest, ModelNotReady, PenstockError, QueueFull
from penstock.core.settings import BlockSettings, Health, Priorities, Residence, Routing
from penstock.router.actions import Action, RecallJob, SendJob
from penstock.router.policies.hashing import KeyOwners
from penstock.router.policies.policy import RandomNumber, make_policy
from penstock.router.slots import Job, Line, Offer, Slot

MAX_RECALLS = 3  # of one job
_get_order = attrgetter("rank", "submitted_at")  # jobs with lower values leave their lines first


@dataclass(frozen=True, slots=True)
class BlockRules:
    """The settings of a block that the router follows."""

    max_queue: int = 1024
    routing: Routing = field(default_factory=Routing)
    health: Health = field(default_factory=Health)
    priorities: Priorities = field(default_factory=Priorities)
    max_waiting_s: float = Residence().max_waiting_s

    @classmethod
    def from_settings(cls, settings: BlockSettings, routing: Routing | None = None) -> "BlockRules":
        """Return the rules in a block's settings; `routing` replaces `settings.routing` unless `routing` is None."""
        return cls(
            settings.batching.max_queue,
            routing or settings.routing,
            settings.health,
            settings.priorities,
            settings.residence.max_waiting_s,
        )


class Recalls:
    """Chooses jobs to recall from workers in favour of a waiting job of a higher level.

    Each waiting job recalls at most one job: of the jobs of the lowest level the one that was sent last, because the
    worker has most likely not started that job. A worker ignores the recall of a started job. A job is recalled at most
    `MAX_RECALLS` times. Jobs of sessions are never recalled, because a session must stay on its worker.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, dict[int, Job]] = defaultdict(dict)  # by level, in the order of sending
        self._recalled_ids: set[int] = set()  # recalled jobs that their workers still have

    def add_sent(self, job: Job) -> None:
        if not job.session and job.recalls < MAX_RECALLS:
            self._sent[job.priority][job.job_id] = job

    def forget(self, job: Job) -> bool:
        """Forget a job that is no longer on its worker; return whether the job had been recalled."""
        self._sent[job.priority].pop(job.job_id, None)
        was_asked = job.job_id in self._recalled_ids
        self._recalled_ids.discard(job.job_id)
        return was_asked

    def choose(self, waiting_job: Job) -> RecallJob | None:
        """Return the recall in favour of this waiting job, or None if no job of a lower level can be recalled."""
        if waiting_job.line is None or waiting_job.is_delayed:
            return None
        found = self._find_last_below(waiting_job.priority, waiting_job.line.slot)
        if found is None or found.slot is None:
            return None
        del self._sent[found.priority][found.job_id]
        self._recalled_ids.add(found.job_id)
        found.recalls += 1
        return RecallJob(found.slot.worker, found.job_id)

    def _find_last_below(self, level: int, only_slot: Slot | None) -> Job | None:
        """Return the last sent job of the lowest level below `level`, of the jobs on `only_slot` if it is given."""
        for lower in sorted(self._sent, reverse=True):
            if lower <= level:
                return None
            for job in reversed(self._sent[lower].values()):
                if job.slot is only_slot if only_slot is not None else job.slot is not None and job.slot.may_take_jobs:
                    return job
        return None


class Queue:
    """Holds a block's slots and waiting jobs, and assigns jobs to slots. A slot with n credits runs at most n jobs.

    Invariant: a job waits in `line` only if no slot has a credit left, and in a slot's own line only if that slot has
    no credit left.
    """

    def __init__(self, rules: BlockRules, draw: RandomNumber) -> None:
        self.rules = rules
        self.policy = make_policy(rules.routing, draw)
        self.is_hashed = rules.routing.policy == "hash"
        self._has_level_limits = _has_level_limits(rules.priorities)
        self.recalls = Recalls() if rules.priorities.levels > 1 else None
        self.slots: dict[bytes, Slot] = {}
        self.key_owners = KeyOwners()  # maps keys to the slots that are not ejected
        self.ejected: dict[bytes, Slot] = {}  # in the order of ejection
        self.line = Line()  # jobs that any slot may take
        self.line_without_slots = Line()  # jobs with a key or session, while the block has no slot
        self.jobs_without_worker: list[Job] = []  # jobs whose only possible worker is gone; the job table fails them
        self.unanswered = 0  # jobs that left without an answer: timed out or cancelled
        self.retirement_error: PenstockError | None = (
            None  # error for the jobs of a withdrawn block when no slot is left
        )
        self.waits_until = inf  # while no worker has the block: when jobs stop waiting for a worker
        self.length = 0  # jobs in all lines together
        self._levels: defaultdict[int, int] = defaultdict(int)  # waiting jobs by level

    # --- slots

    def add_credits(self, slot: Slot, offer: Offer) -> None:
        weight = offer.weight if offer.weight > 0 else 1.0
        if (slot.weight, slot.distance) != (weight, offer.distance):
            self._remove_slot(slot)
            slot.weight, slot.distance = weight, offer.distance
        slot.credits = offer.credits
        self.waits_until = inf
        if not slot.is_ejected and slot not in self.key_owners:
            self._add_key_owner(slot)
        self.update_policy(slot)

    def remove_slot(self, slot: Slot) -> None:
        self._remove_slot(slot)
        self.key_owners.remove(slot)
        self.ejected.pop(slot.worker, None)
        slot.credits = 0
        slot.is_ejected = False
        slot.recent_failures = None

    def eject(self, slot: Slot) -> None:
        slot.is_ejected = True
        self.ejected[slot.worker] = slot
        self.key_owners.remove(slot)
        self._remove_slot(slot)

    def restore(self, slot: Slot) -> None:
        del self.ejected[slot.worker]
        slot.is_ejected = False
        slot.recent_failures = None
        self._add_key_owner(slot)
        self.update_policy(slot)

    def change_rules(self, rules: BlockRules, draw: RandomNumber) -> bool:
        """Replace the rules; return whether waiting jobs may now belong to other lines."""
        before, self.rules = self.rules.routing.policy, rules
        self._has_level_limits = _has_level_limits(rules.priorities)
        if (rules.priorities.levels > 1) != (self.recalls is not None):
            self.recalls = Recalls() if self.recalls is None else None  # jobs that were sent before are not recalled
        if rules.routing.policy == before:
            return False
        listed = [slot for slot in self.slots.values() if slot.is_listed]
        for slot in listed:
            self.policy.remove(slot)
        self.policy = make_policy(rules.routing, draw)
        for slot in self.slots.values():
            slot.turn = 0.0  # the new policy must not use the old policy's turns
        for slot in listed:
            self.policy.add(slot)
        was_hashed, self.is_hashed = self.is_hashed, rules.routing.policy == "hash"
        return was_hashed != self.is_hashed

    # --- running

    def assign(self, slot: Slot, job: Job, now: float) -> SendJob:
        job.slot, job.sent = slot, now
        job.attempt += 1
        slot.jobs[job.job_id] = job
        slot.in_flight += 1
        if self.recalls is not None:
            self.recalls.add_sent(job)
        if slot.is_listed:
            if slot.in_flight >= slot.credits:
                self._remove_slot(slot)
            elif self.policy.is_tracking_job_counts:
                self.policy.update_job_count(slot)
        return SendJob(slot.worker, job)

    def release(self, slot: Slot, job: Job) -> None:
        """Remove the job from the slot and free the credit. Call `assign_waiting` or `update_policy` afterwards."""
        job.slot = None
        del slot.jobs[job.job_id]
        slot.in_flight -= 1
        if self.recalls is not None:
            self.recalls.forget(job)

    def recall(self, jobs: Iterable[Job]) -> list[Action]:
        """Return recalls in favour of these jobs: at most one recall for each job that still waits."""
        if self.recalls is None:
            return []
        return [recall for job in jobs if (recall := self.recalls.choose(job)) is not None]

    def assign_waiting(self, slot: Slot, now: float) -> list[Action]:
        """Assign waiting jobs to the slot while it has credits.

        A job waits in the shared line only while no other slot has credits, so no other slot needs to be considered.
        """
        actions: list[Action] = []
        while self.length and slot.in_flight < slot.credits and not slot.is_ejected:
            line = self.line
            if slot.line.length and not (
                line.length and _get_order(line.peek_first()) < _get_order(slot.line.peek_first())
            ):
                line = slot.line
            if not line.length:
                break
            actions.append(self.assign(slot, self._pop_from(line), now))
        self.update_policy(slot)
        return actions

    def assign_all_waiting(self, slots: Iterable[Slot], now: float) -> list[Action]:
        """Send all waiting jobs that have a free slot: first jobs that wait for these slots, then jobs for any slot."""
        actions = [action for slot in slots if slot.line.length for action in self.assign_waiting(slot, now)]
        while self.line.length and (taker := self.policy.choose(now)) is not None:
            actions.append(self.assign(taker, self._pop_from(self.line), now))
        return actions

    def update_policy(self, slot: Slot) -> None:
        """Add the slot to the policy or remove the slot, and notify the policy of the slot's number of jobs."""
        if slot.in_flight >= slot.credits or slot.is_ejected:
            self._remove_slot(slot)
        elif not slot.is_listed:
            slot.is_listed = True
            self.policy.add(slot)
        elif self.policy.is_tracking_job_counts:
            self.policy.update_job_count(slot)

    # --- waiting

    def find_line(self, job: Job, now: float) -> tuple[Line, Slot | None]:
        """Return the line in which the job would wait, and the slot that can run the job now, or None.

        Raise InvalidRequest if the block's routing requires a key and the request has none.
        """
        key = self._find_key(job)
        if not key:
            routing = self.rules.routing
            if self.is_hashed and routing.without_key == "refuse":
                parameter = routing.key or "session_id"
                raise InvalidRequest(
                    f"this model routes requests by a key: send parameter '{parameter}'", parameter=parameter
                )
            return self.line, None if self.line.length else self.policy.choose(now)
        slot = self._find_home(job, key)
        if slot is None:
            return self.line_without_slots, None
        return slot.line, slot if slot.is_listed and not slot.line.length else None

    def has_lost_home(self, job: Job) -> bool:
        """Return whether the only worker that may run the job has left or is ejected."""
        return job.is_bound and self.slots.get(job.home) not in self.key_owners

    @property
    def is_stranded(self) -> bool:
        """Return whether the block is withdrawn and no slot can run the block's jobs."""
        return self.retirement_error is not None and not self.has_slots

    @property
    def has_slots(self) -> bool:
        """Return whether a worker has the block, even if the worker's slot is ejected."""
        return bool(self.key_owners or self.ejected)

    def check_room(self, job: Job, now: float) -> None:
        """Raise QueueFull if the job may not wait, or another error if no slot will run the job soon."""
        if self.retirement_error is not None and self.is_stranded:
            raise copy(self.retirement_error)
        if now >= self.waits_until:
            raise create_no_worker_error(job)
        if self.length >= self.rules.max_queue:
            raise QueueFull(
                f"{self.length} requests already wait for this block (batching.max_queue); try again later",
                block=job.block_id,
            )
        bound = self.rules.priorities.policy(job.priority).max_queue if self._has_level_limits else None
        if bound is not None and self._levels[job.priority] >= bound:
            raise QueueFull(
                f"{bound} requests of priority {job.priority} already wait for this block (priorities: max_queue); "
                "try again later",
                block=job.block_id,
            )

    def add_waiting(self, line: Line, job: Job, is_first: bool = False) -> None:
        line.append(job, is_first)
        self.length += 1
        self._levels[job.priority] += 1

    def move(self, jobs: Iterable[Job], is_first: bool = False) -> None:
        """Queue each job in the line to which its key or session now belongs; at the front if `is_first`."""
        for job in jobs:
            if self.has_lost_home(job):
                self.jobs_without_worker.append(job)
            else:
                self.add_waiting(self._find_line(job), job, is_first)

    def delay(self, job: Job) -> None:
        line = job.line
        assert line is not None, f"job {job.job_id} does not wait"
        line.remove_waiting(job)
        job.is_delayed = True
        line.append(job)

    def remove_waiting(self, job: Job) -> None:
        assert job.line is not None, f"job {job.job_id} does not wait"
        job.line.remove_waiting(job)
        self.length -= 1
        self._levels[job.priority] -= 1

    def drain(self, line: Line) -> list[Job]:
        if not line.length:
            return []
        jobs = line.drain()
        self.length -= len(jobs)
        for job in jobs:
            self._levels[job.priority] -= 1
        return jobs

    def drain_all(self) -> list[Job]:
        """Remove all waiting jobs and return them, the oldest first."""
        return self._drain_lines([self.line, self.line_without_slots, *(slot.line for slot in self.slots.values())])

    # --- internals

    def _add_key_owner(self, slot: Slot) -> None:
        """Make the slot own a part of the keys, and move the waiting jobs with these keys to the slot's line."""
        self.key_owners.add(slot)
        if self.length > self.line.length:
            self.move(self._drain_lines([self.line_without_slots, *(other.line for other in self.slots.values())]))

    def _remove_slot(self, slot: Slot) -> None:
        if slot.is_listed:
            slot.is_listed = False
            self.policy.remove(slot)

    def _drain_lines(self, lines: Iterable[Line]) -> list[Job]:
        return sorted((job for line in lines for job in self.drain(line)), key=attrgetter("submitted_at"))

    def _pop_from(self, line: Line) -> Job:
        job = line.pop()
        self.length -= 1
        self._levels[job.priority] -= 1
        return job

    def _find_key(self, job: Job) -> str:
        """Return the key that assigns the job to one slot, or an empty string if any slot may run the job."""
        return job.session or (job.key if self.is_hashed else "")

    def _find_home(self, job: Job, key: str) -> Slot | None:
        """Return the slot that ran the job's session before, even if a newer slot now owns the key."""
        slot = self.slots.get(job.home)
        return slot if slot is not None and slot in self.key_owners else self.key_owners.find_owner(key)

    def _find_line(self, job: Job) -> Line:
        key = self._find_key(job)
        if not key:
            return self.line
        slot = self._find_home(job, key)
        return self.line_without_slots if slot is None else slot.line


def create_no_worker_error(job: Job) -> ModelNotReady:
    name = f"model '{job.request.model}'"
    return ModelNotReady(
        f"no worker that is connected to this gateway has {name} now; try again later", block=job.block_id
    )


def list_awaited_slots(jobs: Iterable[Job]) -> list[Slot]:
    """Return the slots in whose own lines these jobs wait."""
    lines = dict.fromkeys(job.line for job in jobs if job.line is not None)
    return [line.slot for line in lines if line.slot is not None]


def _has_level_limits(priorities: Priorities) -> bool:
    return any(policy.max_queue is not None for policy in (priorities.queue, *priorities.by_level.values()))
