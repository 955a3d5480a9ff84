"""Whoever leads, as a manager of the same cluster knows it: for what it passes on."""

import asyncio
from collections.abc import AsyncIterator

from penstock.manager.manager import Manager
from penstock.manager.waiters import wait_at_most
from penstock.wire.leader import LeaderAt

LOOK_S = 0.2


class ElectedManager:
    """Implements wire.leader.LeaderSource."""

    def __init__(self, manager: Manager, own: str) -> None:
        """`own`: where the manager itself is reached. It answers what only reads also where nobody leads."""
        self._manager = manager
        self._own = own
        self._is_hurried = asyncio.Event()

    async def follow(self) -> AsyncIterator[LeaderAt]:
        last: LeaderAt | None = None
        while True:
            at = self._at()
            if at != last:
                yield at
                last = at
            await wait_at_most(self._is_hurried, LOOK_S)
            self._is_hurried.clear()

    def hurry(self) -> None:
        self._is_hurried.set()

    async def close(self) -> None:
        """There is nothing open."""

    def _at(self) -> LeaderAt:
        leader = self._manager.election.leader
        if self._manager.epoch or leader is None or not leader.address:
            return LeaderAt(self._own, self._manager.epoch)
        return LeaderAt(leader.address, self._manager.election.leader_epoch)
