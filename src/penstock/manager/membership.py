"""Keeps the list of a cluster's gateways in the metadata store as gateways join and leave."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import structlog

from penstock.core.errors import NameTaken, PenstockError
from penstock.manager.desired_state import GATEWAYS, DesiredState, GatewayList, GatewayRecord, encode
from penstock.storage.metadata.metadata_store import Write

log = structlog.get_logger()
now = time.monotonic
RECONNECT_S = 2.0  # for a gateway to connect again after its stream ended, before it is removed from the list
NEW_LEADER_S = 6.0  # for the gateways of the previous leader to connect to a new one


class GatewayStream(NamedTuple):
    stream: int
    gateway: GatewayRecord
    incarnation: str


class Membership:
    def __init__(self, state: DesiredState, commit: Callable[[Sequence[Write]], Awaitable[int]]) -> None:
        self._state = state
        self._commit = commit
        self._connected: dict[str, GatewayStream] = {}  # by gateway id: its current stream
        self._leave_at: dict[str, float] = {}  # by id of a disconnected gateway: when it is removed
        self._writing = asyncio.Lock()

    def start_term(self, is_fresh: bool) -> None:
        """Give the gateways in the list time to connect, unless `is_fresh`, because then no gateway is running yet."""
        self._connected.clear()
        until = now() + (0.0 if is_fresh else NEW_LEADER_S)
        self._leave_at = {each.gateway_id: until for each in self._state.gateways.gateways}

    async def add_gateway(self, stream: int, gateway: GatewayRecord, incarnation: str = "") -> None:
        """Add the gateway; raise NameTaken if another process with this name is connected."""
        connected = self._connected.get(gateway.gateway_id)
        if connected is not None and connected.incarnation != incarnation:
            raise NameTaken.for_role(gateway.gateway_id)
        self._connected[gateway.gateway_id] = GatewayStream(stream, gateway, incarnation)
        self._leave_at.pop(gateway.gateway_id, None)
        await self._write_list()

    async def stream_ended(self, stream: int, gateway_id: str, is_leaving: bool) -> None:
        """Record that the gateway's stream ended; remove the gateway at once if `is_leaving`."""
        connected = self._connected.get(gateway_id)
        if connected is None or connected.stream != stream:
            return
        del self._connected[gateway_id]
        self._leave_at[gateway_id] = now() if is_leaving else now() + RECONNECT_S
        await self.tick(now())

    async def tick(self, at: float) -> None:
        """Remove the gateways that disconnected and have not connected again in time."""
        if any(until <= at for until in self._leave_at.values()):
            try:
                await self._write_list(at)
            except PenstockError as error:
                log.warning("writing_membership_failed", error=error.message)

    async def _write_list(self, at: float = 0.0) -> None:
        async with self._writing:
            staying = {gateway_id for gateway_id, until in self._leave_at.items() if until > at}
            kept = {each.gateway_id: each for each in self._state.gateways.gateways if each.gateway_id in staying}
            kept |= {gateway_id: connected.gateway for gateway_id, connected in self._connected.items()}
            wanted = GatewayList(gateways=tuple(kept[gateway_id] for gateway_id in sorted(kept)))
            if wanted != self._state.gateways:
                await self._commit([Write(GATEWAYS, encode(wanted), may_wait=True)])
            self._leave_at = {gateway_id: until for gateway_id, until in self._leave_at.items() if until > at}
