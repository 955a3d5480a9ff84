"""The protocols between the dispatcher and its lanes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.devices import WorkerDevice
from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.slots import Job, Offer


@dataclass(slots=True, eq=False)
class ConnectedWorker:
    """A gateway's record of a connected worker."""

    key: bytes  # its name in the job table, unique over all lanes; used nowhere else
    worker_id: str
    pid: int
    lane: "Lane"
    zone: str = ""
    blocks: dict[str, BlockDescription] = field(default_factory=dict)
    dormant: set[str] = field(default_factory=set)  # those of its blocks that are not loaded
    jobs: int = 0
    memory_bytes: int = 0
    devices: Sequence[WorkerDevice] = ()
    is_expected_back: bool = True  # if the worker is gone: the supervisor of this machine restarts it

    def list_loaded_blocks(self) -> set[str]:
        """Return the blocks that the worker has in memory."""
        return self.blocks.keys() - self.dormant


class Lane(Protocol):
    """Sends jobs and commands to workers.

    If a worker cannot be reached, the lane calls `LaneOwner.remove_worker` after the failed call has returned, never
    during the call.
    """

    def send(self, worker: bytes, job: Job) -> None: ...

    def cancel(self, worker: bytes, job_id: int) -> None: ...

    def recall(self, worker: bytes, job_id: int) -> None:
        """Ask the worker to return the job if the worker has not started the job."""

    def allow(self, worker: bytes, job_id: int, answers: int) -> None:
        """Allow the worker to send `answers` more answers of a streamed job."""

    def probe(self, worker: bytes, block_id: str) -> None:
        """Ask the worker to report whether the block still works."""

    def wake(self, worker: bytes, block_id: str) -> None:
        """Ask the worker to load a dormant block. The lane calls `LaneOwner.add_worker` when the block is loaded."""

    async def collect_statistics(self) -> list[BlockStatistics]:
        """Return the statistics of the lane's workers, including workers that have left."""

    def tick(self, now: float) -> None:
        """Send due heartbeats, and remove silent workers. Call this many times per second."""

    def close(self) -> None: ...


class LaneOwner(Protocol):
    """Receives the events of lanes (transports to workers); the dispatcher is the only implementation."""

    def count_jobs(self) -> int:
        """Return how many jobs wait or run."""

    def add_worker(self, member: ConnectedWorker, offers: Collection[Offer], lost: Collection[str]) -> None:
        """Set the blocks that the worker holds. The worker no longer has the blocks in `lost` in memory."""

    def remove_worker(self, member: ConnectedWorker, reason: str) -> None: ...

    def receive_answer(self, worker: bytes, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        """Handle an answer or failure of a job. The owner sets the response's model, version and request id.

        Raise WireError if the worker sent more answers than allowed.
        """

    def take_back_jobs(self, worker: bytes, job_ids: Iterable[int]) -> None:
        """Queue the jobs again that the worker returned before starting them."""

    def receive_probe_result(self, worker: bytes, block_id: str, problem: str) -> None:
        """Handle the answer to a probe; an empty `problem` means that the block works."""


class PeerMessages(Protocol):
    """Handles the messages that other gateways send to the socket for workers."""

    def open(self, send: Callable[[bytes, list[Buffer]], bool]) -> None:
        """Start. `send(identity, message)` sends a message to a peer, and returns whether the message was sent."""

    def is_from_peer(self, identity: bytes, kind: str) -> bool:
        """Return whether a message of this kind from this identity comes from another gateway."""

    def receive(self, identity: bytes, kind: str, header: pb.Header, message: list[Buffer]) -> None:
        """Handle a message. Raise WireError if gateways do not send messages of this kind."""

    def tick(self, at: float) -> None: ...

    def close(self) -> None: ...
