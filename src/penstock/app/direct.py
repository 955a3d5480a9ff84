"""A worker's own door, for clients that come direct: a gateway's code over the worker's blocks, in its process.

It is opened, and what it is made of is imported, when the first client asks for it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.app.places import clients_address
from penstock.core.blocks import BlockState, BlockView, ClusterPicture
from penstock.core.cluster.access_view import NO_KEYS, AccessView
from penstock.core.cluster.local import LocalOffer, LocalWorker
from penstock.core.config import Config
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.app.gateway import Gateway
    from penstock.telemetry.traces import Traces
    from penstock.wire.credentials.certificates import Certificates

MAX_GONE = 256  # blocks that are remembered
MAX_PORTS = 64  # that are tried from worker.direct_port on: a machine's workers have one each


class DirectDoor:
    """A worker's WorkerDoor."""

    def __init__(
        self, worker_id: str, config: Config, traces: "Traces", certificates: "Certificates", sockets: Path
    ) -> None:
        self.address = clients_address(config, 0)
        self.is_tls = bool(config.tls.cert)
        self._worker_id = worker_id
        self._config = config
        self._traces = traces
        self._certificates = certificates
        self._sockets = sockets
        self._access = NO_KEYS
        self._blocks: dict[str, BlockView] = {}  # those that went, too: who asks for one is told so
        self._gateway: Gateway | None = None

    def access_changed(self, access: AccessView) -> None:
        self._access = access
        self._show()

    async def open(self, worker: LocalWorker) -> None:
        # What is imported holds others up for little at a time; the event loop turns meanwhile.
        found = await asyncio.to_thread(import_module, "penstock.app.gateway")
        await asyncio.to_thread(import_module, "jwt")
        gateway: Gateway = found.Gateway(f"{self._worker_id}.door", self._config, self._traces, is_workers=True)
        self._gateway = gateway
        gateway.work_here(worker, self._offered)
        self.address = clients_address(self._config, await self._open_port(gateway))

    async def drain(self) -> None:
        if self._gateway is not None:
            await self._gateway.drain()

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()

    async def _open_port(self, gateway: "Gateway") -> int:
        first = self._config.worker.direct_port
        assert first is not None
        ports = range(first, min(first + MAX_PORTS, 65_536)) if first else (0,)
        doors = await gateway.begin(None, self._certificates, self._sockets)
        for port in ports:
            try:
                return await doors.open_grpc(port)
            except ConfigError:
                continue
        raise ConfigError(f"none of the ports {first} to {ports[-1]} is free (setting worker.direct_port)")

    def _offered(self, offers: Sequence[LocalOffer]) -> None:
        here = {offer.block.block_id: _view(offer) for offer in offers}
        gone = [view for block_id, view in self._blocks.items() if block_id not in here][-MAX_GONE:]
        self._blocks = {view.block_id: replace(view, state=BlockState.UNLOADED) for view in gone} | here
        self._show()

    def _show(self) -> None:
        if self._gateway is not None:
            self._gateway.cluster_changed(ClusterPicture(list(self._blocks.values()), access=self._access))


def _view(offer: LocalOffer) -> BlockView:
    block = offer.block
    state = BlockState.DORMANT if offer.is_dormant else BlockState.READY
    return BlockView(block.block_id, block.model, block.version, state, "", has_served=True)
