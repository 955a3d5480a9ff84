"""The workers that a gateway knows: who they are, what they hold, what they have done, and when they die."""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.statistics import BlockStatistics
from penstock.wire.sockets import host_identity

log = structlog.get_logger()
SAME_HOST, SAME_ZONE, ELSEWHERE = 0, 1, 2


@dataclass(slots=True)
class Worker:
    identity: bytes
    worker_id: str
    pid: int
    last_heard: float
    host: str = ""
    zone: str = ""
    blocks: dict[str, BlockDescription] = field(default_factory=dict)
    dormant: set[str] = field(default_factory=set)  # of its blocks
    jobs: int = 0
    memory_bytes: int = 0
    statistics: list[BlockStatistics] = field(default_factory=list)
    pidfd: int = -1

    def resident(self) -> set[str]:
        """The blocks that it has in memory."""
        return self.blocks.keys() - self.dormant


class Members:
    def __init__(self, zone: str, on_death: Callable[[bytes, str], None]) -> None:
        self._host = host_identity()
        self._zone = zone
        self._on_death = on_death
        self._workers: dict[bytes, Worker] = {}
        self._departed: dict[str, BlockStatistics] = {}  # what workers that are gone had done

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, identity: bytes) -> Worker | None:
        return self._workers.get(identity)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def add(self, worker: Worker) -> bool:
        """On one machine the kernel tells of a death at once; elsewhere the heartbeats do. False: dead already."""
        if worker.host == self._host:
            try:
                worker.pidfd = os.pidfd_open(worker.pid)
            except (OSError, OverflowError):
                return False
            asyncio.get_running_loop().add_reader(worker.pidfd, self._on_death, worker.identity, "died")
        self._workers[worker.identity] = worker
        log.info("worker_joined", worker=worker.worker_id, pid=worker.pid)
        return True

    def remove(self, identity: bytes, reason: str) -> Worker | None:
        worker = self._workers.pop(identity, None)
        if worker is None:
            return None
        self._forget_process(worker)
        log.info("worker_gone", worker=worker.worker_id, pid=worker.pid, reason=reason)
        _sum_up(self._departed, worker.statistics)
        return worker

    def close(self) -> None:
        for worker in self._workers.values():
            self._forget_process(worker)

    def distance(self, worker: Worker) -> int:
        if worker.host == self._host:
            return SAME_HOST
        return SAME_ZONE if self._zone and worker.zone == self._zone else ELSEWHERE

    def descriptions(self) -> dict[str, BlockDescription]:
        """The blocks that some worker holds; what one has described counts before what another has not yet."""
        found: dict[str, BlockDescription] = {}
        for worker in self._workers.values():
            for block_id, block in worker.blocks.items():
                if block.is_described or block_id not in found:
                    found[block_id] = block
        return found

    def statistics(self) -> list[BlockStatistics]:
        total: dict[str, BlockStatistics] = {}
        _sum_up(total, self._departed.values())
        for worker in self._workers.values():
            _sum_up(total, worker.statistics)
        return list(total.values())

    def _forget_process(self, worker: Worker) -> None:
        if worker.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1


def _sum_up(total: dict[str, BlockStatistics], found: Iterable[BlockStatistics]) -> None:
    for one in found:
        known = total.setdefault(one.block_id, BlockStatistics(one.block_id, one.model, one.version))
        known.merge(one)
