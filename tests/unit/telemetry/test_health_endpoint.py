"""Readiness of a role, determined within a deadline and published by gRPC's health service."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.core.cluster.addresses import Address
from penstock.core.errors import ConfigError, PenstockError, StoreUnavailable
from penstock.telemetry import health_endpoint as endpoint_module
from penstock.telemetry.health_endpoint import HealthEndpoint
from penstock.wire.grpc_listener.grpc_server import grpc_server


def plain(server: grpc.aio.Server, address: str) -> int:
    return int(server.add_insecure_port(address))


class Endpoint:
    """An open endpoint, and the problem that its role reports."""

    def __init__(self) -> None:
        self.found = ""
        self.error: Exception | None = None
        self.endpoint = HealthEndpoint(self._problem, grpc_server, plain)
        self.grpc = Address("127.0.0.1")

    async def _problem(self) -> str:
        if self.error is not None:
            raise self.error
        return self.found

    async def open(self) -> None:
        self.grpc = await self.endpoint.open_grpc(Address("127.0.0.1", 0))


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    await made.open()
    yield made
    await made.endpoint.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreUnavailable("the store does not answer"), "the store does not"),
        (RuntimeError("a bug"), "the log says why"),
    ],
)
async def test_a_role_whose_check_fails_is_unready(endpoint: Endpoint, error: PenstockError, said: str) -> None:
    endpoint.error = error
    assert said in await endpoint.endpoint.find_problem()


async def test_a_role_whose_check_is_slow_is_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "PROBLEM_S", 0.05)
    endpoint = HealthEndpoint(lambda: asyncio.sleep(60, ""), grpc_server, plain)
    assert "readiness could not be determined" in await endpoint.find_problem()


async def test_the_grpc_health_service_follows_readiness(endpoint: Endpoint) -> None:
    async with grpc.aio.insecure_channel(str(endpoint.grpc)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status)

        while await status() != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        endpoint.found = "it is shutting down"
        while await status() != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_taken_port_is_reported(endpoint: Endpoint) -> None:
    other = Endpoint()
    with pytest.raises(ConfigError, match="cannot listen"):
        await other.endpoint.open_grpc(endpoint.grpc)
    await other.open()
    await other.endpoint.close()
