"""A block in the job table: its slots, the policy that chooses among them, and the lines of those who wait."""

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter

from penstock.core.errors import InvalidRequest, PenstockError, QueueFull
from penstock.core.settings import BlockSettings, Health, Priorities, Routing
from penstock.router.actions import Action, Send
from penstock.router.policies.hashing import KeyPlaces
from penstock.router.policies.policy import Draw, make_policy
from penstock.router.recalls import Recalls
from penstock.router.slots import Job, Line, Offer, Slot

_turn = attrgetter("rank", "submitted")  # of those who wait, the lower goes first


@dataclass(frozen=True, slots=True)
class BlockRules:
    max_queue: int = 1024
    routing: Routing = field(default_factory=Routing)
    health: Health = field(default_factory=Health)
    priorities: Priorities = field(default_factory=Priorities)

    @classmethod
    def of(cls, settings: BlockSettings, routing: Routing | None = None) -> "BlockRules":
        """`routing` stands before the model's own."""
        return cls(settings.batching.max_queue, routing or settings.routing, settings.health, settings.priorities)


class Queue:
    """While a job waits in `line`, no slot has a credit left; while one waits in a slot's line, that slot has none."""

    def __init__(self, rules: BlockRules, draw: Draw) -> None:
        self.rules = rules
        self.policy = make_policy(rules.routing, draw)
        self.is_hashed = rules.routing.policy == "hash"
        self._has_bounds = _has_bounds(rules.priorities)
        self.recalls = Recalls() if rules.priorities.levels > 1 else None
        self.slots: dict[bytes, Slot] = {}
        self.places = KeyPlaces()  # of the fit slots
        self.ejected: dict[bytes, Slot] = {}  # in the order of their ejection
        self.line = Line()  # for any slot
        self.homeless = Line()  # jobs that belong to one slot, while there is none
        self.orphans: list[Job] = []  # jobs whose home is gone for good: to be failed
        self.unanswered = 0  # jobs that left without an answer: too late, or given up
        self.retired: PenstockError | None = None  # what is told to those who wait when the last slot goes
        self.length = 0  # of all lines together
        self._levels: defaultdict[int, int] = defaultdict(int)  # how many wait, by level

    # --- slots

    def grant(self, slot: Slot, offer: Offer) -> None:
        weight = offer.weight if offer.weight > 0 else 1.0
        if (slot.weight, slot.distance) != (weight, offer.distance):
            self._unlist(slot)
            slot.weight, slot.distance = weight, offer.distance
        slot.credits = offer.credits
        if not slot.is_ejected and slot not in self.places:
            self._move_in(slot)
        self.review(slot)

    def withdraw(self, slot: Slot) -> None:
        """The slot takes no more jobs."""
        self._unlist(slot)
        self.places.remove(slot)
        self.ejected.pop(slot.worker, None)
        slot.credits = 0
        slot.is_ejected = False
        slot.condition = None

    def eject(self, slot: Slot) -> None:
        slot.is_ejected = True
        self.ejected[slot.worker] = slot
        self.places.remove(slot)
        self._unlist(slot)

    def restore(self, slot: Slot) -> None:
        del self.ejected[slot.worker]
        slot.is_ejected = False
        slot.condition = None
        self._move_in(slot)
        self.review(slot)

    def adopt(self, rules: BlockRules, draw: Draw) -> bool:
        """Takes other rules. Returns whether jobs that wait may belong into other lines."""
        before, self.rules = self.rules.routing.policy, rules
        self._has_bounds = _has_bounds(rules.priorities)
        if (rules.priorities.levels > 1) != (self.recalls is not None):
            self.recalls = Recalls() if self.recalls is None else None  # of what is sent from now on
        if rules.routing.policy == before:
            return False
        listed = [slot for slot in self.slots.values() if slot.is_listed]
        for slot in listed:
            self.policy.remove(slot)
        self.policy = make_policy(rules.routing, draw)
        for slot in self.slots.values():
            slot.turn = 0.0  # turns of another policy mean nothing to this one
        for slot in listed:
            self.policy.add(slot)
        was_hashed, self.is_hashed = self.is_hashed, rules.routing.policy == "hash"
        return was_hashed != self.is_hashed

    # --- running

    def assign(self, slot: Slot, job: Job, now: float) -> Send:
        job.slot, job.sent = slot, now
        job.attempt += 1
        slot.jobs[job.job_id] = job
        slot.in_flight += 1
        if self.recalls is not None:
            self.recalls.sent(job)
        if slot.is_listed:
            if slot.in_flight >= slot.credits:
                self._unlist(slot)
            elif self.policy.is_counting:
                self.policy.changed(slot)
        return Send(slot.worker, job)

    def release(self, slot: Slot, job: Job) -> None:
        """The slot has a credit more: `hand_on` or `review` has to follow."""
        job.slot = None
        del slot.jobs[job.job_id]
        slot.in_flight -= 1
        if self.recalls is not None:
            self.recalls.gone(job)

    def recall(self, jobs: Iterable[Job]) -> list[Action]:
        """What is taken back for those of these jobs that have to wait."""
        if self.recalls is None:
            return []
        return [recall for job in jobs if (recall := self.recalls.choose(job)) is not None]

    def hand_on(self, slot: Slot, now: float) -> list[Action]:
        """Gives the slot's credits to those who wait: while one waits for whoever is free, no other slot has any."""
        actions: list[Action] = []
        while self.length and slot.in_flight < slot.credits and not slot.is_ejected:
            line = self.line
            if slot.line.length and not (line.length and _turn(line.first()) < _turn(slot.line.first())):
                line = slot.line
            if not line.length:
                break
            actions.append(self.assign(slot, self._take(line), now))
        self.review(slot)
        return actions

    def spread(self, slots: Iterable[Slot], now: float) -> list[Action]:
        """Sends what can be sent: first what waits for these slots alone, then what any may take."""
        actions = [action for slot in slots if slot.line.length for action in self.hand_on(slot, now)]
        while self.line.length and (taker := self.policy.choose(now)) is not None:
            actions.append(self.assign(taker, self._take(self.line), now))
        return actions

    def review(self, slot: Slot) -> None:
        """Tells the policy whether the slot may take a job, and that its in_flight has changed."""
        if slot.in_flight >= slot.credits or slot.is_ejected:
            self._unlist(slot)
        elif not slot.is_listed:
            slot.is_listed = True
            self.policy.add(slot)
        elif self.policy.is_counting:
            self.policy.changed(slot)

    # --- waiting

    def seek(self, job: Job, now: float) -> tuple[Line, Slot | None]:
        """The line in which the job has to wait, and the slot that can take it instead. Raises InvalidRequest."""
        key = self._key_of(job)
        if not key:
            routing = self.rules.routing
            if self.is_hashed and routing.without_key == "refuse":
                parameter = routing.key or "session_id"
                raise InvalidRequest(
                    f"requests to this model are placed by a key: send parameter '{parameter}'", parameter=parameter
                )
            return self.line, None if self.line.length else self.policy.choose(now)
        slot = self._home_of(job, key)
        if slot is None:
            return self.homeless, None
        return slot.line, slot if slot.is_listed and not slot.line.length else None

    def has_lost_home(self, job: Job) -> bool:
        """Whether the only worker that may run it is gone, or takes no more."""
        return job.is_bound and self.slots.get(job.home) not in self.places

    @property
    def is_stranded(self) -> bool:
        """Nobody takes its jobs, and nobody will."""
        return self.retired is not None and not self.places and not self.ejected

    def check_room(self, job: Job) -> None:
        """Raises QueueFull, or why the block takes no more."""
        if self.retired is not None and self.is_stranded:
            raise copy(self.retired)
        if self.length >= self.rules.max_queue:
            raise QueueFull(f"{self.length} requests wait for this block already (max_queue)", block=job.block_id)
        bound = self.rules.priorities.policy(job.priority).max_queue if self._has_bounds else None
        if bound is not None and self._levels[job.priority] >= bound:
            raise QueueFull(
                f"{bound} requests of priority {job.priority} wait for this block already (priorities: max_queue)",
                block=job.block_id,
            )

    def wait(self, line: Line, job: Job, is_first: bool = False) -> None:
        line.append(job, is_first)
        self.length += 1
        self._levels[job.priority] += 1

    def move(self, jobs: Iterable[Job], is_first: bool = False) -> None:
        """Lets the jobs wait anew, in this order or each in front of its level, where they belong now."""
        for job in jobs:
            if self.has_lost_home(job):
                self.orphans.append(job)
            else:
                self.wait(self._line_of(job), job, is_first)

    def delay(self, job: Job) -> None:
        line = job.line
        assert line is not None, f"job {job.job_id} does not wait"
        line.take_out(job)
        job.is_delayed = True
        line.append(job)

    def take_out(self, job: Job) -> None:
        assert job.line is not None, f"job {job.job_id} does not wait"
        job.line.take_out(job)
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
        """Empties all lines, and returns their jobs, the oldest first."""
        return self._gather([self.line, self.homeless, *(slot.line for slot in self.slots.values())])

    # --- what the above is made of

    def _move_in(self, slot: Slot) -> None:
        """The slot takes what belongs to it, also of the jobs that wait."""
        self.places.add(slot)
        if self.length > self.line.length:
            self.move(self._gather([self.homeless, *(other.line for other in self.slots.values())]))

    def _unlist(self, slot: Slot) -> None:
        if slot.is_listed:
            slot.is_listed = False
            self.policy.remove(slot)

    def _gather(self, lines: Iterable[Line]) -> list[Job]:
        return sorted((job for line in lines for job in self.drain(line)), key=attrgetter("submitted"))

    def _take(self, line: Line) -> Job:
        job = line.pop()
        self.length -= 1
        self._levels[job.priority] -= 1
        return job

    def _key_of(self, job: Job) -> str:
        """What places the job on one slot; empty: any may take it."""
        return job.session or (job.key if self.is_hashed else "")

    def _home_of(self, job: Job, key: str) -> Slot | None:
        """The worker that has run its session stays its home, also where another has come that would own it now."""
        slot = self.slots.get(job.home)
        return slot if slot is not None and slot in self.places else self.places.owner(key)

    def _line_of(self, job: Job) -> Line:
        key = self._key_of(job)
        if not key:
            return self.line
        slot = self._home_of(job, key)
        return self.homeless if slot is None else slot.line


def homes(jobs: Iterable[Job]) -> list[Slot]:
    """The slots that these jobs wait for."""
    lines = dict.fromkeys(job.line for job in jobs if job.line is not None)
    return [line.slot for line in lines if line.slot is not None]


def _has_bounds(priorities: Priorities) -> bool:
    return any(policy.max_queue is not None for policy in (priorities.queue, *priorities.by_level.values()))
