"""A job as the worker holds it, and the way its answers go."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.core.requests import SessionStep, Timing
from penstock.core.tensors import Array, Tensor
from penstock.engines.base import CallContext
from penstock.tasks.base import Prepared, TaskRequest
from penstock.worker.running.batcher import QueuedPiece


class Reply(Protocol):
    """Called on the event loop. `is_partial`: a decoupled model has more to say; the last answer is never partial."""

    def __call__(
        self, job: "WorkerJob", outcome: list[Tensor] | PenstockError, is_partial: bool = False, /
    ) -> None: ...


class AnswerCredits:
    """How many answers of a decoupled job may be sent: its gateway allows them, the model's thread uses them up.

    While none is allowed the model's thread waits, and the model with it. All but `take` is for the event loop.
    """

    def __init__(self, allowed: int, expiry: asyncio.TimerHandle) -> None:
        self._allowed = threading.Semaphore(allowed)
        self._expiry = expiry  # of the job
        self._is_closed = False

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def close(self) -> None:
        """No more answers are wanted: who waits in `take` is told so."""
        self._expiry.cancel()
        self._is_closed = True
        self._allowed.release()

    def take(self) -> bool:
        """Waits until one more answer may be sent. False: none is wanted any more."""
        if not self._is_closed:
            self._allowed.acquire()
        return not self._is_closed


@dataclass(slots=True, eq=False)
class WorkerJob:
    """A job as the worker holds it, from its arrival to its answer."""

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
    missing: int = 0
    queued: Sequence[QueuedPiece] = ()  # its pieces, while it is here
    is_gone: bool = False
    has_started: bool = False
    timing: Timing = field(default_factory=Timing)
    priority: int = 1  # 1 is the highest
    queue_deadline: float = inf  # past it the block's queue policy decides
    session: SessionStep | None = None
    response_credits: int = 0  # answers of a decoupled model that may be sent; 0: the job has one answer
    answers: AnswerCredits | None = None  # of a decoupled model
    context: CallContext | None = None  # for a model's own code, as the job starts
    is_anew: bool = False  # its session was known to the model, and begins again
    room: object = None  # what it holds of the worker's memory, for as long as it is referred to


class Holder(Protocol):
    """Where a block's jobs go on a worker: its runner, or what waits for it to be loaded."""

    def accept(self, job: WorkerJob) -> None: ...

    def cancel(self, job: WorkerJob) -> None: ...

    def recall(self, job: WorkerJob) -> bool:
        """Takes the job out where nothing of it has run; returns whether it did."""
        ...

    def allow(self, job: WorkerJob, credits: int) -> None:
        """So many more answers of this job may be sent."""
        ...
