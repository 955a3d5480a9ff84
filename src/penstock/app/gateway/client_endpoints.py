"""A gateway's endpoints for clients: gRPC, and HTTP unless the gateway runs in a worker's process."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.core.config import Config
from penstock.endpoints.guard import Guard
from penstock.endpoints.large_messages import LargeMessagePool
from penstock.features.async_requests.async_requests import AsyncRequests
from penstock.features.direct.direct_grpc import DirectGrpc, Discover
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.features.search.block_search import BlockSearch
from penstock.gateway.blocks.block_grpc import BlockGrpc
from penstock.gateway.blocks.packet_calls import PacketCalls
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.gateway_grpc import GrpcServer
from penstock.gateway.native_grpc.server_choice import choose_grpc_server
from penstock.gateway.oip.grpc_service import OipGrpc
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.shared_memory.shared_memory_grpc import SharedMemoryGrpc
from penstock.serving.serve import Serving
from penstock.telemetry.metrics import open_shared_registry
from penstock.telemetry.snapshot import SnapshotReader
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader_connection import LeaderClient
from penstock.wire.sockets import read_host_identity

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from penstock.endpoints.http.openapi import Admit
    from penstock.features.live.streams import LiveStreams

log = structlog.get_logger()
GRACE_S = 1.0  # for running calls when the gateway closes without draining
CLOSE_S = 3.0  # for the HTTP server to end
NO_CERTIFICATES = Certificates()


class ClientEndpoints:
    def __init__(
        self,
        config: Config,
        serving: Serving,
        catalogue: Catalogue,
        guard: Guard,
        certificates: Certificates,
        sockets: Path,
        search: BlockSearch,
        edge: GatewaySockets | None = None,
        requests: AsyncRequests | None = None,
    ) -> None:
        """Create the endpoints from the parts of a gateway; they are not open yet.

        `sockets` is a folder for unix sockets that only this user can open; `edge`: the sockets of a gateway behind
        Envoy. `requests`: the asynchronous requests; None in a worker's process.
        """
        self._requests = requests
        self._config = config
        self._serving = serving
        self._catalogue = catalogue
        self._guard = guard
        self._certificates = certificates
        self._large = LargeMessagePool(config.limits)
        self._edge = edge
        self._choice = catalogue.grpc_server = choose_grpc_server(config, not guard.is_open, edge is not None)
        self._search = search
        self._behind = sockets if self._choice.is_native else None
        self._grpc: GrpcServer | None = None
        self._http: uvicorn.Server | None = None
        self._serving_http: asyncio.Task[None] | None = None
        self._live: LiveStreams | None = None

    async def open(
        self,
        grpc_port: int,
        http_socket: socket.socket,
        metrics: Path,
        publish: Callable[[], None],
        discover: Discover | None = None,
        leader: LeaderClient | None = None,
    ) -> int:
        """Open gRPC and HTTP; return the gRPC port.

        `metrics` is the folder with the metrics of all processes; `publish` updates this process's metrics there.
        `discover` asks the manager for a worker that a client may call directly; `leader` receives administration
        calls.
        """
        # Imported here, because a worker's direct endpoint does not need these modules.
        from penstock.endpoints.http.http_guard import HttpGuard, list_machine_names
        from penstock.features.live.streams import LiveStreams
        from penstock.gateway.http_app import build_http_app, create_http_server

        config, limits, catalogue = self._config, self._config.limits, self._catalogue
        memory = SharedMemory(
            metrics.parent / "shared-memory",
            max_request_bytes=limits.max_message_bytes,
            is_allowed=config.allow_shared_memory,
        )
        # Clients of a loopback endpoint run on this machine.
        host = read_host_identity() if config.is_local else ""
        direct = None if discover is None else DirectGrpc(self._serving.resolver, discover, host)
        is_behind_edge = self._edge is not None
        edge = OipGrpc(self._serving, catalogue, self._guard, memory, self._large, is_behind_edge)
        packets = PacketCalls(self._serving, catalogue, self._large, self._requests)
        blocks = BlockGrpc(packets, edge)
        server = GrpcServer(
            edge,
            limits,
            SharedMemoryGrpc(memory),
            direct=direct,
            blocks=blocks,
            backend_folder=self._behind,
            sockets=self._edge,
        )
        port = catalogue.grpc_port = await self._start_grpc(server, grpc_port)
        self._live = LiveStreams(SnapshotReader(metrics).read, publish, catalogue.describe_server)
        app = build_http_app(
            self._serving,
            catalogue,
            limits,
            lambda: open_shared_registry(metrics),
            HttpGuard(config, self._guard, list_machine_names()),
            self._live,
            memory,
            self._large,
            partial(_build_cluster_app, leader, catalogue.server_version) if leader is not None else None,
            self._search,
            self._requests,
        )
        certificates = NO_CERTIFICATES if is_behind_edge else self._certificates
        self._http = create_http_server(app, limits, self._serving.admission, certificates, is_behind_edge)
        self._serving_http = asyncio.create_task(self._http.serve(sockets=[http_socket]), name="http")
        return port

    async def open_grpc(self, port: int) -> int:
        """Open a gRPC server without HTTP on a port that no other process shares; return the port."""
        is_behind_edge = self._edge is not None
        edge = OipGrpc(self._serving, self._catalogue, self._guard, large=self._large, is_behind_edge=is_behind_edge)
        blocks = BlockGrpc(PacketCalls(self._serving, self._catalogue, self._large), edge)
        server = GrpcServer(
            edge,
            self._config.limits,
            blocks=blocks,
            is_port_shared=False,
            backend_folder=self._behind,
            sockets=self._edge,
        )
        return await self._start_grpc(server, port)

    async def set_ready(self, is_ready: bool) -> bool:
        """Set the status of the gRPC health service; return False if the gRPC server is not listening yet."""
        if self._grpc is not None:
            await self._grpc.set_ready(is_ready)
        return self._grpc is not None

    async def close(self) -> None:
        if self._live is not None:
            self._live.close()  # a live stream would keep the HTTP server open
        if self._http is not None:
            self._http.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(GRACE_S)
        if self._serving_http is not None:
            await asyncio.wait([self._serving_http], timeout=CLOSE_S)
            self._serving_http.cancel()
            await asyncio.gather(self._serving_http, return_exceptions=True)
        self._large.close()

    async def _start_grpc(self, server: GrpcServer, port: int) -> int:
        found = await server.start(self._config.host, port, self._certificates)
        log.debug("grpc_server_started", server=self._choice.server, port=found, reason=self._choice.reason)
        self._grpc = server
        return found


def _build_cluster_app(leader: LeaderClient, version: str, admit: "Admit") -> "FastAPI":
    # Imported at the first administration call, because most gateways never get one.
    from penstock.features.admin.apps import build_cluster_app
    from penstock.features.admin.manager_calls import ClusterCalls

    return build_cluster_app(ClusterCalls(leader), version, admit)
