"""The interface between a worker and the endpoint for direct clients in the same process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.core.blocks import BlockDescription
from penstock.core.errors import PenstockError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.statistics import BlockStatistics


class LocalOffer(NamedTuple):
    """A block that the worker offers to run, and the number of jobs that it accepts for the block at once."""

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
    """Receives a worker's events. The worker never calls the receiver from within a call that the receiver made."""

    def receive_offers(self, offers: Sequence[LocalOffer]) -> None:
        """Replace the list of offered blocks."""

    def receive_answer(self, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None: ...

    def take_back_jobs(self, job_ids: Sequence[int]) -> None:
        """Take back jobs that the worker did not start."""

    def receive_probe_result(self, block_id: str, problem: str) -> None: ...


class LocalWorker(Protocol):
    """The methods of a worker that the endpoint for direct clients in the worker's process calls."""

    worker_id: str

    def attach(self, receiver: LocalReceiver) -> None: ...

    def run(self, task: LocalTask) -> None: ...

    def cancel(self, job_id: int) -> None: ...

    def recall(self, job_id: int) -> None: ...

    def allow(self, job_id: int, answers: int) -> None: ...

    def probe(self, block_id: str) -> None: ...

    def wake(self, block_id: str) -> None: ...

    def collect_statistics(self) -> Iterable[BlockStatistics]: ...

    def detach(self) -> None: ...
