"""Whether a role is ready, found out within a time, and told as gRPC's health service."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from penstock.core.cluster.addresses import Address
from penstock.core.errors import ConfigError, PenstockError

log = structlog.get_logger()
MAX_CONNECTIONS = 64
MAX_METADATA_BYTES = 8 * 1024
HANDSHAKE_S = 5.0
LOOK_S = 0.5  # how often gRPC's health is brought up to date
PROBLEM_S = 2.0  # what it takes at most to find out whether the role is ready
SMALL_MESSAGE_BYTES = 4 * 1024
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Problem = Callable[[], Awaitable[str]]
AddPort = Callable[[grpc.aio.Server, str], int]


class HealthDoor:
    def __init__(self, problem: Problem, add_port: AddPort, health: health_aio.HealthServicer | None = None) -> None:
        """`problem` says why the role is not ready, or nothing; `health` is what another server of it has, too."""
        self._problem = problem
        self._add_port = add_port
        self._health = health or health_aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open_grpc(self, address: Address) -> Address:
        """Returns where it listens, where the port was left open; raises ConfigError."""
        server = _health_server(self._health)
        try:
            port = self._add_port(server, str(address))
        except RuntimeError as error:
            raise ConfigError(f"the health door cannot listen for gRPC on {address}") from error
        self._grpc = server
        await server.start()
        self._looking = asyncio.create_task(self._look_forever(), name="health-door")
        return Address(address.host, port)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._grpc is not None:
            await self._grpc.stop(0.0)

    async def problem(self) -> str:
        try:
            return await asyncio.wait_for(self._problem(), PROBLEM_S)
        except TimeoutError:
            return f"it could not be found out within {PROBLEM_S:g} s"
        except PenstockError as error:
            return error.message
        except Exception:
            log.exception("health_unknown")
            return "it could not be found out; the log says why"

    async def _look_forever(self) -> None:
        was_ready = None
        while True:
            problem = await self.problem()
            if was_ready is not (not problem):
                was_ready = not problem
                log.info("readiness", ready=was_ready, why=problem)
                await self._health.set("", SERVING if was_ready else NOT_SERVING)
            await asyncio.sleep(LOOK_S)


def _health_server(health: health_aio.HealthServicer) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", SMALL_MESSAGE_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
        ]
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server
