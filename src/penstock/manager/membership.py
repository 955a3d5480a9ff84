"""The gateways of a cluster: who joined, who is gone. Their list is in the metadata store, and has its revision."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import structlog

from penstock.core.errors import NameTaken, PenstockError
from penstock.manager.desired import GATEWAYS, DesiredState, GatewayList, GatewayRecord, encode
from penstock.storage.metadata.base import Write

log = structlog.get_logger()
now = time.monotonic
AWAY_S = 2.0  # what a gateway whose stream ended gets to call again, before it is a gateway no more
CALL_S = 6.0  # and what those get that an earlier manager knew


class GatewayStream(NamedTuple):
    stream: int
    gateway: GatewayRecord
    incarnation: str


class Membership:
    def __init__(self, state: DesiredState, commit: Callable[[Sequence[Write]], Awaitable[int]]) -> None:
        self._state = state
        self._commit = commit
        self._here: dict[str, GatewayStream] = {}  # by id: the stream that speaks for it
        self._leave_at: dict[str, float] = {}  # gateways that are away
        self._writing = asyncio.Lock()

    def begin(self, is_fresh: bool) -> None:
        """A reign begins: those in the list have the time to call. Where it `is_fresh`, none of them lives."""
        self._here.clear()
        until = now() + (0.0 if is_fresh else CALL_S)
        self._leave_at = {each.gateway_id: until for each in self._state.gateways.gateways}

    async def joined(self, stream: int, gateway: GatewayRecord, incarnation: str = "") -> None:
        """Raises NameTaken where another process of this name is there: two hosts were called alike."""
        here = self._here.get(gateway.gateway_id)
        if here is not None and here.incarnation != incarnation:
            raise NameTaken.of(gateway.gateway_id)
        self._here[gateway.gateway_id] = GatewayStream(stream, gateway, incarnation)
        self._leave_at.pop(gateway.gateway_id, None)
        await self._write()

    async def left(self, stream: int, gateway_id: str, is_leaving: bool) -> None:
        """Its stream ended; one that says that it leaves is gone at once."""
        here = self._here.get(gateway_id)
        if here is None or here.stream != stream:
            return
        del self._here[gateway_id]
        self._leave_at[gateway_id] = now() if is_leaving else now() + AWAY_S
        await self.turn(now())

    async def turn(self, at: float) -> None:
        if any(until <= at for until in self._leave_at.values()):
            try:
                await self._write(at)
            except PenstockError as error:
                log.warning("membership_not_written", error=error.message)

    async def _write(self, at: float = 0.0) -> None:
        async with self._writing:
            staying = {gateway_id for gateway_id, until in self._leave_at.items() if until > at}
            kept = {each.gateway_id: each for each in self._state.gateways.gateways if each.gateway_id in staying}
            kept |= {gateway_id: here.gateway for gateway_id, here in self._here.items()}
            wanted = GatewayList(gateways=tuple(kept[gateway_id] for gateway_id in sorted(kept)))
            if wanted != self._state.gateways:
                await self._commit([Write(GATEWAYS, encode(wanted), may_wait=True)])
            self._leave_at = {gateway_id: until for gateway_id, until in self._leave_at.items() if until > at}
