"""The interface between a worker and its direct endpoint in one process; neither imports the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.core.blocks import BlockDescription
from penstock.core.errors import PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.statistics import BlockStatistics


class LocalOffer(NamedTuple):
    """A block on the worker, and the number of jobs that the direct endpoint may send to the block."""

    block: BlockDescription
    credits: int
    is_dormant: bool = False


@dataclass(slots=True)
class LocalTask:
    """A job for the worker. Deadlines are times of the monotonic clock."""

    job_id: int
    attempt: int
    block_id: str
    request: InferRequest
    deadline: float
    queue_deadline: float
    answers_ahead: int  # answers that may be sent ahead of the client; 0: the job has a single answer


class LocalReceiver(Protocol):
    """Receives the worker's events. The worker never calls the receiver while it handles a call of the receiver."""

    def offered(self, offers: Sequence[LocalOffer]) -> None:
        """Replace the list of offered blocks."""

    def answered(self, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None: ...

    def handed_back(self, job_ids: Sequence[int]) -> None:
        """Take back jobs that the worker did not start."""

    def probed(self, block_id: str, problem: str) -> None: ...


class LocalWorker(Protocol):
    """The interface of a worker to the direct endpoint in the worker's process."""

    worker_id: str

    def attach(self, receiver: LocalReceiver) -> None: ...

    def run(self, task: LocalTask) -> None: ...

    def cancel(self, job_id: int) -> None: ...

    def recall(self, job_id: int) -> None: ...

    def allow(self, job_id: int, answers: int) -> None: ...

    def probe(self, block_id: str) -> None: ...

    def wake(self, block_id: str) -> None: ...

    def statistics(self) -> Iterable[BlockStatistics]: ...

    def detach(self) -> None: ...
