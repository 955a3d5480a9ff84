"""Whether a role is ready: found out within a time, and told as gRPC's health service."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.core.cluster.addresses import Address
from penstock.core.errors import ConfigError, PenstockError, StoreUnavailable
from penstock.telemetry import door as door_module
from penstock.telemetry.door import HealthDoor


def plain(server: grpc.aio.Server, address: str) -> int:
    return int(server.add_insecure_port(address))


class Door:
    """One that is open, and what it finds wrong."""

    def __init__(self) -> None:
        self.found = ""
        self.error: Exception | None = None
        self.door = HealthDoor(self._problem, plain)
        self.grpc = Address("127.0.0.1")

    async def _problem(self) -> str:
        if self.error is not None:
            raise self.error
        return self.found

    async def open(self) -> None:
        self.grpc = await self.door.open_grpc(Address("127.0.0.1", 0))


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    await made.open()
    yield made
    await made.door.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreUnavailable("the store does not answer"), "the store does not"),
        (RuntimeError("a bug"), "the log says why"),
    ],
)
async def test_what_cannot_be_found_out_is_not_ready(door: Door, error: PenstockError, said: str) -> None:
    door.error = error
    assert said in await door.door.problem()


async def test_who_takes_long_to_say_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "PROBLEM_S", 0.05)
    assert "could not be found out" in await HealthDoor(lambda: asyncio.sleep(60, ""), plain).problem()


async def test_grpcs_health_follows(door: Door) -> None:
    async with grpc.aio.insecure_channel(str(door.grpc)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status)

        while await status() != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        door.found = "it is shutting down"
        while await status() != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_port_that_is_taken_is_told(door: Door) -> None:
    other = Door()
    with pytest.raises(ConfigError, match="cannot listen"):
        await other.door.open_grpc(door.grpc)
    await other.open()
    await other.door.close()
