"""A job on a worker, and the interfaces by which it is accepted and answered."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.core.requests import SessionStep, Timing
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Array, Tensor
from penstock.engines.engine_protocols import CallContext
from penstock.tasks.base import Prepared, TaskRequest
from penstock.worker.running.batcher import QueuedPiece


class Reply(Protocol):
    """A function that sends an answer of a job, called on the event loop. `is_partial`: more answers follow."""

    def __call__(
        self, job: "WorkerJob", outcome: list[Tensor] | PenstockError, is_partial: bool = False, /
    ) -> None: ...


class AnswerCredits:
    """Limits how fast a decoupled model's answers are sent: the gateway adds credits, and each answer uses one.

    Without credits, the model's thread waits in `take`. Call all methods except `take` on the event loop.
    """

    def __init__(self, allowed: int, expiry: asyncio.TimerHandle) -> None:
        self._allowed = threading.Semaphore(allowed)
        self._expiry = expiry  # timer of the job's deadline
        self._is_closed = False

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def close(self) -> None:
        """Refuse further answers; if a thread waits in `take`, `take` returns False."""
        self._expiry.cancel()
        self._is_closed = True
        self._allowed.release()

    def take(self) -> bool:
        """Wait until one more answer may be sent; return False if no more answers are wanted."""
        if not self._is_closed:
            self._allowed.acquire()
        return not self._is_closed


@dataclass(slots=True, eq=False)
class WorkerJob:
    """A job on a worker, from its arrival to its last answer."""

    job_id: int
    attempt: int
    request: TaskRequest
    deadline: float
    reply: Reply
    request_id: str = ""
    traceparent: str = ""
    arrived: float = 0.0
    prepared: Prepared | None = None
    results: list[Sequence[Array] | None] = field(default_factory=list)
    missing_results: int = 0
    queued: Sequence[QueuedPiece] = ()  # its pieces, until the job is gone
    is_gone: bool = False
    has_started: bool = False
    timing: Timing = field(default_factory=Timing)
    priority: int = 1  # 1 is the highest
    queue_deadline: float = inf  # after it, the block's queue policy applies
    session: SessionStep | None = None
    response_credits: int = (
        0  # how many answers of a decoupled model may be sent; 0: the client expects a single answer
    )
    answers: AnswerCredits | None = None  # set for a decoupled model
    context: CallContext | None = None  # what a model's own code receives besides tensors; set when the job starts
    restarts_session: bool = False  # the job restarts a session that the model knows
    held_memory: object = None  # the memory that the job holds until nothing refers to the job


class Holder(Protocol):
    """The receiver of a block's jobs: the block's runner, or its queue while the block is not loaded."""

    def accept(self, job: WorkerJob) -> None: ...

    def cancel(self, job: WorkerJob) -> None: ...

    def recall(self, job: WorkerJob) -> bool:
        """Remove the job if it has not started, and return whether it was removed."""
        ...

    def allow(self, job: WorkerJob, credits: int) -> None:
        """Allow this many more answers of the job."""
        ...


class Holders(Protocol):
    """The methods that a link to a gateway calls on a worker's blocks."""

    def holder(self, block_id: str) -> Holder | None:
        """Return the receiver of a block's jobs, or None if the caller must return the jobs to the gateway."""
        ...

    def statistics(self) -> Iterable[BlockStatistics]: ...

    def probe(self, block_id: str, done: Callable[[str], None]) -> None:
        """Check the block, and call `done` with the problem or an empty text."""
        ...

    def wake(self, block_id: str) -> None:
        """Load a dormant block."""
        ...
