"""The workers that are connected to a socket lane, with their distances and statistics; detects dead workers."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from penstock.core.statistics import BlockStatistics, merge_by_block
from penstock.router.lanes.lane import ConnectedWorker
from penstock.wire.job_messages import MessageOutbox
from penstock.wire.sockets import read_host_identity

log = structlog.get_logger()
SAME_HOST, SAME_ZONE, ELSEWHERE = 0, 1, 2
# Reasons why a worker is gone.
LEFT = "left"  # the worker announced its end
DIED = "died"  # its process on this machine ended


@dataclass(slots=True, eq=False)
class SocketWorker(ConnectedWorker):
    """A worker that is connected to a socket lane."""

    host: str = ""
    connection: int = 0
    last_message_at: float = 0.0
    statistics: list[BlockStatistics] = field(default_factory=list)
    pidfd: int = -1
    jobs_out: MessageOutbox | None = None  # collects small jobs; None: the worker accepts only one job per message


class SocketWorkers:
    """A table of the workers of one socket lane, by the identity of each worker's socket."""

    def __init__(self, zone: str, on_death: Callable[[bytes, str], None]) -> None:
        self.is_local = False  # all workers belong to the server on this machine
        self._host = read_host_identity()
        self._zone = zone
        self._on_death = on_death
        self.by_key: dict[bytes, SocketWorker] = {}
        self._departed: list[BlockStatistics] = []  # of workers that are gone

    def add(self, member: SocketWorker) -> bool:
        """Add a worker; return False if the worker's process runs on this host and is already dead.

        The kernel reports the death of a process on this host at once; workers on other hosts count as dead if their
        heartbeats stop.
        """
        if member.host == self._host:
            try:
                member.pidfd = os.pidfd_open(member.pid)
            except (OSError, OverflowError):
                return False
            asyncio.get_running_loop().add_reader(member.pidfd, self._on_death, member.key, DIED)
        self.by_key[member.key] = member
        # For a worker on this host, the log already has a line that its process started.
        report = log.debug if member.host == self._host else log.info
        report("worker_joined", worker=member.worker_id, pid=member.pid)
        return True

    def remove(self, key: bytes, reason: str) -> SocketWorker | None:
        member = self.by_key.pop(key, None)
        if member is None:
            return None
        _close_pidfd(member)
        member.is_expected_back = self.is_local or (member.host == self._host and reason in (LEFT, DIED))
        if member.jobs_out is not None:
            member.jobs_out.clear()
        report = log.debug if reason == LEFT and member.host == self._host else log.info
        report("worker_left", worker=member.worker_id, pid=member.pid, reason=reason)
        for each in member.statistics:
            each.clear_current()
        self._departed = merge_by_block([*self._departed, *member.statistics])
        return member

    def close(self) -> None:
        for member in self.by_key.values():
            _close_pidfd(member)

    def compute_distance(self, member: SocketWorker) -> int:
        if member.host == self._host:
            return SAME_HOST
        return SAME_ZONE if self._zone and member.zone == self._zone else ELSEWHERE

    def collect_statistics(self) -> list[BlockStatistics]:
        return [*self._departed, *(found for member in self.by_key.values() for found in member.statistics)]


def _close_pidfd(member: SocketWorker) -> None:
    if member.pidfd >= 0:
        asyncio.get_running_loop().remove_reader(member.pidfd)
        os.close(member.pidfd)
        member.pidfd = -1
