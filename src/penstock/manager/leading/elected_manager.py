"""Finds the address of the leader from the election in which this manager takes part."""

import asyncio
from collections.abc import AsyncIterator

from penstock.manager.control_plane import ControlPlane
from penstock.manager.waiters import wait_at_most
from penstock.wire.leader_connection import LeaderAddress

LOOK_S = 0.2


class ElectedManager:
    """A LeaderSource that reads the leader's address from this manager's Election."""

    def __init__(self, control: ControlPlane, own_address: str) -> None:
        """`own_address` is this manager's address, to which reads are sent while no manager leads."""
        self._control = control
        self._own = own_address
        self._must_look = asyncio.Event()

    async def follow(self) -> AsyncIterator[LeaderAddress]:
        last: LeaderAddress | None = None
        while True:
            leader = self._find_leader()
            if leader != last:
                yield leader
                last = leader
            await wait_at_most(self._must_look, LOOK_S)
            self._must_look.clear()

    def search_now(self) -> None:
        self._must_look.set()

    async def close(self) -> None:
        """Do nothing: an ElectedManager has nothing to close."""

    def _find_leader(self) -> LeaderAddress:
        leader = self._control.election.leader
        if self._control.epoch or leader is None or not leader.address:
            return LeaderAddress(self._own, self._control.epoch)
        return LeaderAddress(leader.address, self._control.election.leader_epoch)
