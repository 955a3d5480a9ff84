"""Jobs, the lines they wait in, and the slots that take them: what the job table is made of."""

from collections import deque
from dataclasses import dataclass, field
from math import exp, inf
from typing import Literal, NamedTuple

from penstock.core.requests import Controls, InferRequest
from penstock.core.settings import BlockSettings
from penstock.router.health import Condition

BEHIND = 1000  # the lowest level there is: what is delayed ranks below it
MEMORY_S = 10.0  # over which a slot's latency forgets a peak


@dataclass(slots=True, eq=False)
class Job:
    job_id: int
    block_id: str
    request: InferRequest
    deadline: float
    is_idempotent: bool = True
    session: str = ""  # its id: a session's jobs stay together under every policy
    home: bytes = b""  # the worker that has run its session, and in the end the one that ran this job; empty: none yet
    is_bound: bool = False  # only its session's home may run it: no other worker has the session's state
    key: str = ""  # what places it, where the block's policy is hash
    priority: int = 1  # 1 is the highest
    queue_deadline: float = inf  # until when it may wait
    answers_ahead: int = 0  # of several, so many may be on their way to the caller; 0: it has one
    has_answered: bool = False  # in part: what the caller has heard cannot be taken back, so it never runs again
    is_delayed: bool = False  # it waited too long, and goes behind all that did not
    attempt: int = 0  # how often it was sent: a reply must name the newest
    losses: int = 0  # how many workers died with it
    recalls: int = 0  # how often its worker was asked to hand it back for one of a higher level
    slot: "Slot | None" = None  # where it runs
    line: "Line | None" = None  # where it waits
    rank: int = 0  # in its line
    submitted: float = 0.0
    sent: float = 0.0

    def heed(self, controls: Controls, settings: BlockSettings, now: float) -> None:
        """Takes from the request what it asks of the router."""
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
    """Jobs that wait for the same: by level, each in its order, and what is delayed behind everything else.

    A job that leaves the midst stays as a dead entry until it comes to the front, or until there are too many.
    """

    __slots__ = ("_open", "_ranks", "entries", "length", "slot")

    def __init__(self, slot: "Slot | None" = None) -> None:
        self.slot = slot  # the only one that may take these jobs; None: any
        self.length = 0
        self.entries = 0  # with the dead
        self._open = 0  # bit n: rank n may have entries
        self._ranks: dict[int, deque[Job]] = {}

    def append(self, job: Job, is_first: bool = False) -> None:
        """Puts the job at the end of its rank, or in front."""
        job.line = self
        job.rank = rank = job.priority + BEHIND if job.is_delayed else job.priority
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

    def first(self) -> Job:
        assert self.length, "nobody waits here"
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
        job = self.first()
        self._ranks[job.rank].popleft()
        self.entries -= 1
        self.length -= 1
        job.line = None
        return job

    def take_out(self, job: Job) -> None:
        """The job must not come back with the same rank: its dead entry would live again."""
        job.line = None
        self.length -= 1
        if self.entries > 2 * self.length + 64:
            self._sweep()

    def drain(self) -> list[Job]:
        """Empties the line, and returns its jobs in their order."""
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
    """A block on a worker: how many jobs it may have, and those it has."""

    worker: bytes
    block_id: str
    credits: int
    name: str = ""  # the worker's id, which survives its restarts: what is hashed
    weight: float = 1.0
    distance: int = 0  # 0: this host, 1: this zone, 2: elsewhere
    jobs: dict[int, Job] = field(default_factory=dict)
    in_flight: int = 0  # len(jobs)
    line: Line = field(init=False)  # of the jobs that only this slot may take
    is_listed: bool = False  # the policy has it among those that may take a job
    is_ejected: bool = False
    condition: Condition | None = None  # what speaks against it
    latency_s: float = 0.0  # follows peaks at once and forgets them over MEMORY_S; 0: nothing known
    measured: float = 0.0  # when that was
    heard: float = 0.0  # when it last answered a job, well or badly; 0: never
    # The policy's own notes.
    position: int = -1
    bucket: int = 0
    turn: float = 0.0

    def __post_init__(self) -> None:
        self.line = Line(self)

    @property
    def may_take(self) -> bool:
        """A credit that it gets back is of use."""
        return self.credits > 0 and not self.is_ejected

    def measure(self, took_s: float, now: float) -> None:
        """Keeps how long a job took as a peak that decays."""
        latency_s = self.latency_s
        if took_s < latency_s:
            took_s += (latency_s - took_s) * exp((self.measured - now) / MEMORY_S)
        self.latency_s = took_s
        self.measured = now

    def standing(self, now: float) -> "SlotStanding":
        condition = self.condition if self.is_ejected else None
        return SlotStanding(
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
            0.0 if condition is None else max(0.0, condition.due - now),
        )


class Offer(NamedTuple):
    """What a worker says of a block that it holds."""

    block_id: str
    credits: int
    name: str = ""  # the worker's id
    weight: float = 1.0
    distance: int = 0


@dataclass(frozen=True, slots=True)
class SlotStanding:
    worker: bytes
    name: str
    in_flight: int
    waiting: int  # for this worker and no other
    credits: int
    weight: float
    distance: int
    latency_ms: float  # 0: nothing known
    state: Literal["healthy", "ejected"]
    reason: str
    ejected_for_s: float
    next_probe_s: float


class BlockActivity(NamedTuple):
    """Whether a block's requests are answered, at one look."""

    in_hand: int  # requests that wait or run
    waiting: int
    unanswered: int  # requests so far that left without an answer: too late, or given up by their callers
    heard: float  # when some worker last answered one; 0: never
    latency_s: float  # of answers of late
    unanswered_s: float  # health.unanswered_s of its settings
