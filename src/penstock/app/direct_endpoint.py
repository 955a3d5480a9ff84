"""A worker's direct endpoint: runs a gateway's code in the worker's process, with this worker as the only worker.

The worker imports this module and opens the endpoint when the first client calls Discover for it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.app.gateway.clients_edge import find_direct_sockets, open_direct_edge
from penstock.app.ports import reserve_port
from penstock.core.blocks import BlockState, BlockView, ClusterView
from penstock.core.cluster.access_view import NO_KEYS, AccessView
from penstock.core.cluster.local_worker import LocalOffer, LocalWorker
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.storage.process_addresses import find_clients_address

if TYPE_CHECKING:
    from penstock.app.gateway.gateway import Gateway
    from penstock.features.edge.edge import Edge
    from penstock.telemetry.traces import Traces
    from penstock.wire.credentials.certificates import Certificates

MAX_REMOVED = 256  # removed blocks that are remembered
MAX_PORTS = 64  # tried from worker.direct_port on, because each worker of a machine needs its own


class DirectEndpoint:
    """A gateway in the worker's process, whose only worker is that worker; implements WorkerEndpoint."""

    def __init__(
        self, worker_id: str, config: Config, traces: "Traces", certificates: "Certificates", sockets: Path
    ) -> None:
        self.address = find_clients_address(config, 0)
        self.is_tls = bool(config.tls.cert)
        self._worker_id = worker_id
        self._config = config
        self._traces = traces
        self._certificates = certificates
        self._sockets = sockets
        self._access = NO_KEYS
        self._blocks: dict[str, BlockView] = {}  # includes removed blocks, so that a request for one gets a clear error
        self._gateway: Gateway | None = None
        self._edge: Edge | None = None
        self._stack = AsyncExitStack()

    def access_changed(self, access: AccessView) -> None:
        self._access = access
        self._publish()

    async def open(self, worker: LocalWorker) -> None:
        # In a thread, so that the event loop runs while the modules are imported.
        module = await asyncio.to_thread(import_module, "penstock.app.gateway.gateway")
        await asyncio.to_thread(import_module, "jwt")
        gateway: Gateway = module.Gateway(f"{self._worker_id}.direct", self._config, self._traces, is_in_worker=True)
        self._gateway = gateway
        gateway.use_local_worker(worker, self._offers_changed)
        self.address = find_clients_address(self._config, await self._open_port(gateway))

    async def drain(self) -> None:
        if self._edge is not None:
            await self._edge.drain()
        if self._gateway is not None:
            await self._gateway.drain()

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()
        await self._stack.aclose()

    async def _open_port(self, gateway: "Gateway") -> int:
        first = self._config.worker.direct_port
        assert first is not None
        ports = range(first, min(first + MAX_PORTS, 65_536)) if first else (0,)
        sockets = find_direct_sockets(self._config, self._sockets, self._worker_id)
        endpoints = await gateway.begin(None, self._certificates, self._sockets, sockets)
        for port in ports:
            try:
                if sockets is None:
                    return await endpoints.open_grpc(port)
                reserved = self._stack.enter_context(reserve_port(self._config.host, port, ""))
            except ConfigError:
                continue
            assert sockets is not None
            await endpoints.open_grpc(0)
            found = int(reserved.getsockname()[1])
            self._edge = await open_direct_edge(
                self._config, self._sockets, self._worker_id, found, sockets, self._certificates, self._stack
            )
            return found
        raise ConfigError(f"none of the ports {first} to {ports[-1]} is free: set worker.direct_port to another port")

    def _offers_changed(self, offers: Sequence[LocalOffer]) -> None:
        here = {offer.block.block_id: _make_block_view(offer) for offer in offers}
        removed = [view for block_id, view in self._blocks.items() if block_id not in here][-MAX_REMOVED:]
        self._blocks = {view.block_id: replace(view, state=BlockState.UNLOADED) for view in removed} | here
        self._publish()

    def _publish(self) -> None:
        if self._gateway is not None:
            self._gateway.cluster_changed(ClusterView(list(self._blocks.values()), access=self._access))


def _make_block_view(offer: LocalOffer) -> BlockView:
    block = offer.block
    state = BlockState.DORMANT if offer.is_dormant else BlockState.READY
    return BlockView(block.block_id, block.model, block.version, state, "", has_served=True)
