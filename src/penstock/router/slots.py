"""The parts of the job table: jobs, the lines in which they wait, and the slots (a block on a worker) that run them."""

from collections import deque
from dataclasses import dataclass, field
from math import exp, inf
from typing import Literal, NamedTuple

from penstock.core.requests import Controls, InferRequest
from penstock.core.settings import BlockSettings
from penstock.router.health import SlotFailures

DELAYED_RANK = 1000  # more than the number of priority levels, so that delayed jobs rank behind all other jobs
LATENCY_DECAY_S = 10.0  # time constant with which a slot's latency peak decays


@dataclass(slots=True, eq=False)
class Job:
    """A request to one block, which waits in a line or runs on a slot."""

    job_id: int
    block_id: str
    request: InferRequest
    deadline: float
    is_idempotent: bool = True
    session: str = ""  # session id: a session's jobs go to one worker under every policy
    home: bytes = b""  # the worker that ran the session's last request or, when the job is complete, this job; or empty
    is_bound: bool = False  # only `home` may run the job, because no other worker has the session's state
    key: str = ""  # selects the worker if the block's policy is hash
    priority: int = 1  # 1 is the highest
    queue_deadline: float = inf  # the job has waited too long if it still waits at this time
    answers_ahead: int = 0  # partial answers that the worker may send before the caller takes them; 0: no stream
    has_answered: bool = False  # the caller has got a partial answer, so the job must not run again
    is_delayed: bool = False  # the job waited too long, and now waits behind all jobs that did not
    attempt: int = 0  # how often the job was sent; a reply must name the newest attempt
    losses: int = 0  # how many workers died while they ran the job
    recalls: int = 0  # how often its worker was asked to return it for a job of a higher level
    slot: "Slot | None" = None  # the slot that runs it
    line: "Line | None" = None  # the line in which it waits
    rank: int = 0  # its rank in `line`
    submitted_at: float = 0.0
    sent: float = 0.0

    def apply_controls(self, controls: Controls, settings: BlockSettings, now: float) -> None:
        """Set the job's priority, key, queue deadline and session from the request's controls."""
        self.priority = controls.priority
        self.key = controls.shard_key
        if controls.queue_timeout_s is not None:
            self.queue_deadline = now + controls.queue_timeout_s
        step = controls.session
        if step is not None:
            self.session = step.session_id
            if settings.sessions.is_stateful and not step.is_start:
                self.home = step.home
                self.is_idempotent = False
                self.is_bound = True


class Line:
    """A queue of waiting jobs by priority level, first in, first out within a level; delayed jobs come last.

    A job that is removed from the middle stays as a dead entry until the entry reaches the front or is swept.
    """

    __slots__ = ("_open", "_ranks", "entries", "length", "slot")

    def __init__(self, slot: "Slot | None" = None) -> None:
        self.slot = slot  # the only slot that may take these jobs, or None if any slot may
        self.length = 0
        self.entries = 0  # including dead entries
        self._open = 0  # bit n is set if rank n may have entries
        self._ranks: dict[int, deque[Job]] = {}

    def append(self, job: Job, is_first: bool = False) -> None:
        """Add the job at the end of its rank, or at the front if `is_first`."""
        job.line = self
        job.rank = rank = job.priority + DELAYED_RANK if job.is_delayed else job.priority
        entries = self._ranks.get(rank)
        if entries is None:
            entries = self._ranks[rank] = deque()
        if is_first:
            entries.appendleft(job)
        else:
            entries.append(job)
        self._open |= 1 << rank
        self.length += 1
        self.entries += 1

    def peek_first(self) -> Job:
        assert self.length, "the line is empty"
        while True:
            rank = (self._open & -self._open).bit_length() - 1
            entries = self._ranks[rank]
            while entries:
                job = entries[0]
                if job.line is self and job.rank == rank:
                    return job
                entries.popleft()
                self.entries -= 1
            self._open ^= 1 << rank

    def pop(self) -> Job:
        job = self.peek_first()
        self._ranks[job.rank].popleft()
        self.entries -= 1
        self.length -= 1
        job.line = None
        return job

    def remove_waiting(self, job: Job) -> None:
        """Remove a waiting job. Its dead entry would become valid if the job were appended with the same rank."""
        job.line = None
        self.length -= 1
        if self.entries > 2 * self.length + 64:
            self._sweep()

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order."""
        self._sweep()
        jobs = [job for rank in sorted(self._ranks) for job in self._ranks[rank]]
        for job in jobs:
            job.line = None
        self._ranks.clear()
        self.length = self.entries = self._open = 0
        return jobs

    def _sweep(self) -> None:
        alive = {
            rank: deque(job for job in entries if job.line is self and job.rank == rank)
            for rank, entries in self._ranks.items()
        }
        self._ranks = {rank: entries for rank, entries in alive.items() if entries}
        self._open = sum(1 << rank for rank in self._ranks)
        self.entries = self.length


@dataclass(slots=True, eq=False)
class Slot:
    """A block on a worker: the number of jobs that may run there, and the running jobs."""

    worker: bytes
    block_id: str
    credits: int
    name: str = ""  # the worker's id, which stays the same after a restart; hashing uses it
    weight: float = 1.0
    distance: int = 0  # 0: this host, 1: this zone, 2: elsewhere
    jobs: dict[int, Job] = field(default_factory=dict)
    in_flight: int = 0  # len(jobs)
    line: Line = field(init=False)  # jobs that only this slot may take
    is_listed: bool = False  # True while the policy may choose it: it has a credit and is not ejected
    is_ejected: bool = False
    recent_failures: SlotFailures | None = None  # its recent failures, if any
    latency_s: float = 0.0  # rises to a peak at once and decays over MEMORY_S; 0: not measured
    measured_at: float = 0.0  # when `latency_s` was set
    last_answer_at: float = 0.0  # when it last answered a job, with success or failure; 0: never
    # State that belongs to the policy.
    position: int = -1
    bucket: int = 0
    turn: float = 0.0

    def __post_init__(self) -> None:
        self.line = Line(self)

    @property
    def may_take_jobs(self) -> bool:
        """Return whether the slot may run another job as soon as one of its credits is free."""
        return self.credits > 0 and not self.is_ejected

    def record_latency(self, took_s: float, now: float) -> None:
        """Update the slot's latency, a decaying peak, with the time that a job took."""
        latency_s = self.latency_s
        if took_s < latency_s:
            took_s += (latency_s - took_s) * exp((self.measured_at - now) / LATENCY_DECAY_S)
        self.latency_s = took_s
        self.measured_at = now

    def describe_at(self, now: float) -> "SlotState":
        condition = self.recent_failures if self.is_ejected else None
        return SlotState(
            self.worker,
            self.name,
            self.in_flight,
            self.line.length,
            self.credits,
            self.weight,
            self.distance,
            self.latency_s * 1000,
            "healthy" if condition is None else "ejected",
            "" if condition is None else condition.reason,
            0.0 if condition is None else now - condition.ejected_at,
            0.0 if condition is None else max(0.0, condition.next_check_at - now),
        )


class Offer(NamedTuple):
    """A worker's offer to run a block: the number of jobs that the worker accepts, and the worker's distance."""

    block_id: str
    credits: int
    name: str = ""  # the worker's id
    weight: float = 1.0
    distance: int = 0


@dataclass(frozen=True, slots=True)
class SlotState:
    """A snapshot of a slot, for status reports."""

    worker: bytes
    name: str
    in_flight: int
    waiting: int  # for this worker only
    credits: int
    weight: float
    distance: int
    latency_ms: float  # 0: not measured
    state: Literal["healthy", "ejected"]
    reason: str
    ejected_for_s: float
    next_probe_s: float


class BlockActivity(NamedTuple):
    """A snapshot of a block's requests, from which readiness is decided."""

    unfinished: int  # number of requests that wait or run
    waiting: int
    unanswered: int  # total of requests that left without an answer: timed out or cancelled
    last_answer_at: float  # when a worker last answered a request of the block; 0: never
    latency_s: float  # highest recent latency of its slots
