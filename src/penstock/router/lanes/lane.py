"""What every lane does for the dispatcher, and what the dispatcher hears from it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse
from penstock.core.statistics import BlockStatistics
from penstock.router.slots import Job, Offer


@dataclass(slots=True, eq=False)
class Member:
    """A worker as a gateway knows it."""

    key: bytes  # names it in the job table and nowhere else; no two lanes give the same
    worker_id: str
    pid: int
    lane: "Lane"
    zone: str = ""
    blocks: dict[str, BlockDescription] = field(default_factory=dict)
    dormant: set[str] = field(default_factory=set)  # of its blocks
    jobs: int = 0
    memory_bytes: int = 0
    devices: Sequence[WorkerDevice] = ()

    def resident(self) -> set[str]:
        """The blocks that it has in memory."""
        return self.blocks.keys() - self.dormant


class Lane(Protocol):
    """Says things to workers. One that cannot be reached has left: the owner hears so after the call, never in it."""

    def send(self, worker: bytes, job: Job) -> None: ...

    def cancel(self, worker: bytes, job_id: int) -> None: ...

    def recall(self, worker: bytes, job_id: int) -> None:
        """Asks for the job to be handed back, where it has not started."""

    def allow(self, worker: bytes, job_id: int, answers: int) -> None:
        """Lets the worker send so many more answers of a job that has several."""

    def probe(self, worker: bytes, block_id: str) -> None:
        """Asks whether the block still works."""

    def wake(self, worker: bytes, block_id: str) -> None:
        """Asks for a dormant block to be loaded; the worker joins again when it is."""

    async def statistics(self) -> list[BlockStatistics]:
        """What its workers have done, and those that have left."""

    def tick(self, now: float) -> None:
        """Called many times a second, to beat and to find out who is silent."""

    def close(self) -> None: ...


class LaneOwner(Protocol):
    """Hears what workers say on its lanes."""

    def jobs(self) -> int:
        """How many jobs wait or run."""

    def joined(self, member: Member, offers: Collection[Offer], lost: Collection[str]) -> None:
        """It holds these blocks from now on; those that were `lost` it no longer has in memory."""

    def left(self, member: Member, reason: str) -> None: ...

    def answered(self, worker: bytes, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        """The response says what the worker gave; model, version and request id are left to the owner.

        Raises WireError where the worker sends more answers than it may.
        """

    def handed_back(self, worker: bytes, job_ids: Iterable[int]) -> None:
        """The worker did not start these jobs."""

    def probed(self, worker: bytes, block_id: str, problem: str) -> None:
        """An empty problem says that the block works."""
