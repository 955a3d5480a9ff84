"""The workers of the ZeroMQ lane: how near they are, what they have done, and when they die."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from penstock.core.statistics import BlockStatistics, summed
from penstock.router.lanes.lane import Member
from penstock.wire.frames import FrameOutbox
from penstock.wire.sockets import host_identity

log = structlog.get_logger()
SAME_HOST, SAME_ZONE, ELSEWHERE = 0, 1, 2


@dataclass(slots=True, eq=False)
class ZmqMember(Member):
    host: str = ""
    connection: int = 0
    last_heard: float = 0.0
    statistics: list[BlockStatistics] = field(default_factory=list)
    pidfd: int = -1
    jobs_out: FrameOutbox | None = None  # None: it takes them one by one


class Members:
    def __init__(self, zone: str, on_death: Callable[[bytes, str], None]) -> None:
        self._host = host_identity()
        self._zone = zone
        self._on_death = on_death
        self.by_key: dict[bytes, ZmqMember] = {}
        self._departed: list[BlockStatistics] = []  # what workers that are gone had done

    def add(self, member: ZmqMember) -> bool:
        """On one machine the kernel tells of a death at once; elsewhere the heartbeats do. False: dead already."""
        if member.host == self._host:
            try:
                member.pidfd = os.pidfd_open(member.pid)
            except (OSError, OverflowError):
                return False
            asyncio.get_running_loop().add_reader(member.pidfd, self._on_death, member.key, "died")
        self.by_key[member.key] = member
        log.info("worker_joined", worker=member.worker_id, pid=member.pid)
        return True

    def remove(self, key: bytes, reason: str) -> ZmqMember | None:
        member = self.by_key.pop(key, None)
        if member is None:
            return None
        _forget_process(member)
        if member.jobs_out is not None:
            member.jobs_out.clear()
        log.info("worker_gone", worker=member.worker_id, pid=member.pid, reason=reason)
        for each in member.statistics:
            each.depart()
        self._departed = summed([*self._departed, *member.statistics])
        return member

    def close(self) -> None:
        for member in self.by_key.values():
            _forget_process(member)

    def distance(self, member: ZmqMember) -> int:
        if member.host == self._host:
            return SAME_HOST
        return SAME_ZONE if self._zone and member.zone == self._zone else ELSEWHERE

    def statistics(self) -> list[BlockStatistics]:
        return [*self._departed, *(found for member in self.by_key.values() for found in member.statistics)]


def _forget_process(member: ZmqMember) -> None:
    if member.pidfd >= 0:
        asyncio.get_running_loop().remove_reader(member.pidfd)
        os.close(member.pidfd)
        member.pidfd = -1
