"""The local lane: passes jobs, without encoding, to the worker in the same process."""

import os
from collections.abc import Callable, Sequence

from penstock.core.cluster.local_worker import LocalOffer, LocalTask, LocalWorker
from penstock.core.errors import PenstockError
from penstock.core.requests import InferResponse
from penstock.core.statistics import BlockStatistics
from penstock.router.lanes.lane import ConnectedWorker, LaneOwner
from penstock.router.slots import Job, Offer

WORKER_KEY = b"local"


class LocalLane:
    """A Lane to the one worker in this process."""

    def __init__(
        self,
        worker: LocalWorker,
        owner: LaneOwner,
        on_offers: Callable[[Sequence[LocalOffer]], None] = lambda offers: None,
    ) -> None:
        self._worker = worker
        self._owner = owner
        self._on_offers = on_offers
        self._member = ConnectedWorker(WORKER_KEY, worker.worker_id, os.getpid(), self)

    def open(self) -> None:
        self._worker.attach(self)

    # --- called by the owner

    def send(self, worker: bytes, job: Job) -> None:
        self._worker.run(
            LocalTask(
                job.job_id,
                job.attempt,
                job.block_id,
                job.request,
                job.deadline,
                job.queue_deadline,
                job.answers_ahead,
            )
        )

    def cancel(self, worker: bytes, job_id: int) -> None:
        self._worker.cancel(job_id)

    def recall(self, worker: bytes, job_id: int) -> None:
        self._worker.recall(job_id)

    def allow(self, worker: bytes, job_id: int, answers: int) -> None:
        self._worker.allow(job_id, answers)

    def probe(self, worker: bytes, block_id: str) -> None:
        self._worker.probe(block_id)

    def wake(self, worker: bytes, block_id: str) -> None:
        self._worker.wake(block_id)

    async def collect_statistics(self) -> list[BlockStatistics]:
        return list(self._worker.collect_statistics())

    def tick(self, now: float) -> None:
        """Do nothing: the worker runs in this process and cannot become silent."""

    def close(self) -> None:
        self._worker.detach()

    # --- called by the worker: LocalReceiver

    def receive_offers(self, offers: Sequence[LocalOffer]) -> None:
        member = self._member
        before = member.list_loaded_blocks()
        member.blocks = {offer.block.block_id: offer.block for offer in offers}
        member.dormant = {offer.block.block_id for offer in offers if offer.is_dormant}
        given = [Offer(offer.block.block_id, offer.credits, member.worker_id) for offer in offers]
        self._owner.add_worker(member, given, before - member.list_loaded_blocks())
        self._on_offers(offers)

    def receive_answer(self, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        self._owner.receive_answer(WORKER_KEY, job_id, attempt, outcome)

    def take_back_jobs(self, job_ids: Sequence[int]) -> None:
        self._owner.take_back_jobs(WORKER_KEY, job_ids)

    def receive_probe_result(self, block_id: str, problem: str) -> None:
        self._owner.receive_probe_result(WORKER_KEY, block_id, problem)
