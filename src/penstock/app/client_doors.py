"""The doors of a gateway for its clients: gRPC, and HTTP where it is not a worker's own."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.access.guard import Guard
from penstock.core.config import Config
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.grpc.choice import choose_grpc_server
from penstock.gateway.grpc.direct import DirectGrpc, Discover
from penstock.gateway.grpc.oip import OipGrpc
from penstock.gateway.grpc.server import GrpcServer
from penstock.gateway.grpc.shared_memory import SharedMemoryGrpc
from penstock.gateway.large import LargeMessages
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.serving.serve import Serving
from penstock.telemetry.metrics import shared_registry
from penstock.telemetry.snapshot import SnapshotReader
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader import Leader
from penstock.wire.sockets import host_identity

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from penstock.gateway.http.live.streams import LiveStreams
    from penstock.gateway.http.openapi import Admit

log = structlog.get_logger()
GRACE_S = 1.0  # what is inside gets to end, where it was not drained
CLOSE_S = 3.0


class ClientDoors:
    def __init__(
        self,
        config: Config,
        serving: Serving,
        catalogue: Catalogue,
        guard: Guard,
        certificates: Certificates,
        sockets: Path,
    ) -> None:
        """`sockets`: a folder for them, of this user alone."""
        self._config = config
        self._serving = serving
        self._catalogue = catalogue
        self._guard = guard
        self._certificates = certificates
        self._large = LargeMessages(config.limits)
        self._choice = catalogue.grpc_server = choose_grpc_server(config, not guard.is_open)
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
        leader: Leader | None = None,
    ) -> int:
        """Returns the gRPC port. `metrics`: the folder of all processes', to which `publish` adds this one's;
        `discover` asks the manager for a worker for a client, `leader` is whom the administration asks."""
        # Here and not above: a worker's own door has none of it.
        from penstock.gateway.http.app import build_http_app
        from penstock.gateway.http.doorman import Doorman, machine_names
        from penstock.gateway.http.live.streams import LiveStreams
        from penstock.gateway.http.server import http_server

        config, limits, catalogue = self._config, self._config.limits, self._catalogue
        memory = SharedMemory(
            metrics.parent / "shared-memory",
            max_request_bytes=limits.max_message_bytes,
            is_allowed=config.allow_shared_memory,
        )
        # Who reaches a door that is open to this machine alone is on this machine.
        host = host_identity() if config.is_local else ""
        direct = None if discover is None else DirectGrpc(self._serving.resolver, discover, host)
        edge = OipGrpc(self._serving, catalogue, self._guard, memory, self._large)
        server = GrpcServer(edge, limits, SharedMemoryGrpc(memory), direct=direct, behind=self._behind)
        port = await self._start(server, grpc_port)
        self._live = LiveStreams(SnapshotReader(metrics).read, publish, catalogue.standing)
        app = build_http_app(
            self._serving,
            catalogue,
            limits,
            lambda: shared_registry(metrics),
            Doorman(config, self._guard, machine_names()),
            self._live,
            memory,
            self._large,
            partial(_build_cluster, leader, catalogue.server_version) if leader is not None else None,
        )
        self._http = http_server(app, limits, self._serving.admission, self._certificates)
        self._serving_http = asyncio.create_task(self._http.serve(sockets=[http_socket]), name="http")
        return port

    async def open_grpc(self, port: int) -> int:
        """Opens one for gRPC alone, at a port that nobody shares. Returns the port."""
        edge = OipGrpc(self._serving, self._catalogue, self._guard, large=self._large)
        server = GrpcServer(edge, self._config.limits, is_port_shared=False, behind=self._behind)
        return await self._start(server, port)

    async def set_ready(self, is_ready: bool) -> bool:
        """Returns whether there is a door that says so."""
        if self._grpc is not None:
            await self._grpc.set_ready(is_ready)
        return self._grpc is not None

    async def close(self) -> None:
        if self._live is not None:
            self._live.close()  # an endless answer would hold the HTTP server open
        if self._http is not None:
            self._http.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(GRACE_S)
        if self._serving_http is not None:
            await asyncio.wait([self._serving_http], timeout=CLOSE_S)
            self._serving_http.cancel()
            await asyncio.gather(self._serving_http, return_exceptions=True)
        self._large.close()

    async def _start(self, server: GrpcServer, port: int) -> int:
        found = await server.start(self._config.host, port, self._certificates)
        log.info("grpc_server", server=self._choice.server, port=found, why=self._choice.reason)
        self._grpc = server
        return found


def _build_cluster(leader: Leader, version: str, admit: "Admit") -> "FastAPI":
    # Few ever ask for it.
    from penstock.gateway.http.cluster.app import build_cluster_app
    from penstock.gateway.http.cluster.calls import ClusterCalls

    return build_cluster_app(ClusterCalls(leader), version, admit)
