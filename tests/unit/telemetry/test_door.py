"""A health door: what it says, and what it takes of nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from benchmarks.waiting import until
from penstock.core.cluster.addresses import Address
from penstock.core.errors import ConfigError, Forbidden, PenstockError, StoreUnavailable, Unauthenticated, UnknownHost
from penstock.telemetry import door as door_module
from penstock.telemetry.door import HealthDoor

HEALTHY = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


class Door:
    """One that is open, and what it finds wrong."""

    def __init__(self) -> None:
        self.found = ""
        self.error: PenstockError | None = None
        self.registry = CollectorRegistry()
        Counter("things", "Some", registry=self.registry)
        self.stranger: PenstockError | None = None
        self.door = HealthDoor(self._problem, lambda: self.registry, _refusal, lambda *shown: self.stranger)
        self.http = self.grpc = Address("127.0.0.1")

    async def _problem(self) -> str:
        if self.error is not None:
            raise self.error
        return self.found

    async def open(self) -> None:
        self.http = await self.door.open_http(Address("127.0.0.1", 0))
        self.grpc = await self.door.open_grpc(Address("127.0.0.1", 0))

    async def ask(self, request: bytes) -> bytes:
        """Sends the bytes, and reads until the door closes."""
        reader, writer = await asyncio.open_connection(*self.http)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        head, _, body = (await self.ask(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())).partition(
            b"\r\n\r\n"
        )
        return int(head.split()[1]), body


def _refusal(headers: list[tuple[bytes, bytes]], method: str) -> PenstockError | None:
    return UnknownHost("not this host") if (b"host", b"evil.example") in headers else None


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    await made.open()
    yield made
    await made.door.close()


async def test_it_says_how_its_role_is(door: Door) -> None:
    assert await door.get("/healthz") == (200, b'{"status":"alive"}')
    assert await door.get("/readyz") == (200, b'{"status":"ready"}')
    door.found = "it is shutting down"
    assert await door.get("/readyz?verbose") == (503, b'{"status":"not ready","reason":"it is shutting down"}')
    assert (await door.get("/healthz"))[0] == 200
    status, text = await door.get("/metrics")
    assert (status, b"things_total" in text) == (200, True)
    assert (await door.get("/else"))[0] == 404


async def test_metrics_are_for_whom_the_guard_admits_and_health_is_for_all(door: Door) -> None:
    for error, status in ((Unauthenticated("a key"), b"401"), (Forbidden("the scope"), b"403")):
        door.stranger = error
        answer = await door.ask(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answer.split()[1] == status
        assert (b"www-authenticate: Basic" in answer) is (status == b"401")
        assert b"things" not in answer
        assert (await door.get("/healthz"))[0] == (await door.get("/readyz"))[0] == 200


async def test_what_cannot_be_found_out_is_not_ready(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.error = StoreUnavailable("the store does not answer")
    assert await door.get("/readyz") == (503, b'{"status":"not ready","reason":"the store does not answer"}')
    monkeypatch.setattr(door_module, "PROBLEM_S", 0.05)
    other = HealthDoor(lambda: asyncio.sleep(60, ""), lambda: door.registry, _refusal)
    assert "could not be found out" in await other.problem()


async def test_a_bug_closes_no_door(door: Door) -> None:
    def fail() -> CollectorRegistry:
        raise RuntimeError("a bug")

    async def wonder() -> str:
        raise RuntimeError("a bug")

    door.door._registry = fail
    assert (await door.get("/metrics"))[0] == 500
    door.door._problem = wonder
    assert await door.get("/readyz") == (
        503,
        b'{"status":"not ready","reason":"it could not be found out; the log says why"}',
    )
    assert (await door.get("/healthz"))[0] == 200


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


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /healthz HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /healthz HTTP/1.1\r\nhost: evil.example\r\n\r\n", b"421"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", b"431"),
        (HEALTHY * 100, b"200"),
        (b"HEAD /healthz HTTP/1.1\r\n\r\n", b"200"),
    ],
)
async def test_what_is_sent_to_it(door: Door, request_bytes: bytes, status: bytes) -> None:
    assert (await door.ask(request_bytes)).startswith(b"HTTP/1.1 " + status)


async def test_who_is_slow_is_let_go(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "REQUEST_S", 0.05)
    assert (await door.ask(b"GET /healthz HT")).startswith(b"HTTP/1.1 408")
    monkeypatch.setattr(door_module, "ANSWER_S", 0.05)
    reader, writer = await asyncio.open_connection(*door.http)
    writer.write(HEALTHY)  # and does not close
    await asyncio.sleep(0.2)
    assert await reader.read() != b""
    writer.close()


async def test_few_connections_at_once(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(door_module, "REQUEST_S", 60.0)
    idle = [await asyncio.open_connection(*door.http) for _ in range(3)]
    await until(lambda: len(door.door._connections) == 3)
    with suppress(OSError):
        assert await door.ask(HEALTHY) == b""
    for _, writer in idle:
        writer.close()
    await until(lambda: not door.door._connections)
    assert (await door.get("/healthz"))[0] == 200


async def test_a_port_that_is_taken_is_told(door: Door) -> None:
    other = Door()
    with pytest.raises(ConfigError, match="cannot listen"):
        await other.door.open_http(door.http)
    with pytest.raises(ConfigError, match="cannot listen"):
        await other.door.open_grpc(door.grpc)
    await other.open()
    await other.door.close()
