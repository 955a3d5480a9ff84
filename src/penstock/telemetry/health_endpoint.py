"""Readiness of a role, determined within a deadline and published by gRPC's health service."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from penstock.core.cluster.addresses import Address
from penstock.core.errors import ConfigError, PenstockError
from penstock.telemetry.background import BackgroundTasks, describe_failing_loop

log = structlog.get_logger()
MAX_CONNECTIONS = 64
MAX_METADATA_BYTES = 8 * 1024
HANDSHAKE_S = 5.0
LOOK_S = 0.5  # between updates of gRPC's health service
PROBLEM_S = 2.0  # the deadline for finding out whether the role is ready
SMALL_MESSAGE_BYTES = 4 * 1024
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", SMALL_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
)

Problem = Callable[[], Awaitable[str]]
AddPort = Callable[[grpc.aio.Server, str], int]
MakeServer = Callable[[Sequence[tuple[str, Any]]], grpc.aio.Server]


class HealthEndpoint:
    def __init__(
        self,
        problem: Problem,
        make_server: MakeServer,
        add_port: AddPort,
        health: health_aio.HealthServicer | None = None,
    ) -> None:
        """Create the endpoint. `problem` returns why the role is not ready, or ""; other servers may share `health`."""
        self._problem = problem
        self._make_server = make_server
        self._add_port = add_port
        self._health = health or health_aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._tasks = BackgroundTasks("health")
        self._was_ready: bool | None = None

    async def open_grpc(self, address: Address) -> Address:
        """Listen, and return the address with the chosen port; raise ConfigError if the port is taken."""
        server = self._make_server(OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = self._add_port(server, str(address))
        except RuntimeError as error:
            raise ConfigError(
                f"the health endpoint cannot listen for gRPC on {address}: choose another port (--health-grpc-port)"
            ) from error
        self._grpc = server
        await server.start()
        self._tasks.supervise("health", self._publish, every=LOOK_S)
        return Address(address.host, port)

    async def close(self) -> None:
        await self._tasks.close()
        if self._grpc is not None:
            await self._grpc.stop(0.0)

    async def find_problem(self) -> str:
        try:
            return await asyncio.wait_for(self._problem(), PROBLEM_S) or describe_failing_loop()
        except TimeoutError:
            return f"readiness could not be determined within {PROBLEM_S:g} s"
        except PenstockError as error:
            return error.message
        except Exception:
            log.exception("health_unknown")
            return "readiness could not be determined; the log says why"

    async def _publish(self) -> None:
        """Publish the role's readiness through gRPC's health service."""
        problem = await self.find_problem()
        if self._was_ready is not (not problem):
            await self._health.set("", NOT_SERVING if problem else SERVING)
            report = log.debug if problem and self._was_ready is None else log.info  # a role is never ready at first
            self._was_ready = not problem
            report("readiness_changed", ready=self._was_ready, reason=problem)
