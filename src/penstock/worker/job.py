"""A job as the worker holds it, and the way its answer goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import PenstockError
from penstock.core.requests import Timing
from penstock.core.tensors import Array, Tensor
from penstock.tasks.base import Prepared, TaskRequest

Reply = Callable[["WorkerJob", "list[Tensor] | PenstockError"], None]


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
    is_gone: bool = False
    has_started: bool = False
    timing: Timing = field(default_factory=Timing)
