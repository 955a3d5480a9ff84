"""How a gateway's code and a worker's meet in one process: the door of a worker of its own.

What either knows of the other is here: neither imports the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.core.blocks import BlockDescription
from penstock.core.errors import PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.statistics import BlockStatistics


class LocalOffer(NamedTuple):
    """A block that the worker holds, and how many of its jobs may come this way."""

    block: BlockDescription
    credits: int
    is_dormant: bool = False


@dataclass(slots=True)
class LocalTask:
    """A job as it is given to the worker; times are of the monotonic clock."""

    job_id: int
    attempt: int
    block_id: str
    request: InferRequest
    deadline: float
    queue_deadline: float
    answers_ahead: int  # of several; 0: it has one


class LocalEars(Protocol):
    """Hears the worker, after a call to it and never in one."""

    def offered(self, offers: Sequence[LocalOffer]) -> None:
        """It holds these now, and no others."""

    def answered(self, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None: ...

    def handed_back(self, job_ids: Sequence[int]) -> None:
        """It did not start these jobs."""

    def probed(self, block_id: str, problem: str) -> None: ...


class LocalWorker(Protocol):
    """What the worker does for the door."""

    worker_id: str

    def attach(self, ears: LocalEars) -> None: ...

    def run(self, task: LocalTask) -> None: ...

    def cancel(self, job_id: int) -> None: ...

    def recall(self, job_id: int) -> None: ...

    def allow(self, job_id: int, answers: int) -> None: ...

    def probe(self, block_id: str) -> None: ...

    def wake(self, block_id: str) -> None: ...

    def statistics(self) -> Iterable[BlockStatistics]: ...

    def detach(self) -> None: ...
