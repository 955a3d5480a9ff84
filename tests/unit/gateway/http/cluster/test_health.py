"""A health door over HTTP: what it says, and what it takes of nobody."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.access.guard import Guard
from penstock.access.keys import KeyTable
from penstock.app.ports import open_own_socket
from penstock.core.config import Config, Limits
from penstock.core.principals import INFERRING, MEASURING, Principal
from penstock.gateway.http.cluster.health import LIMITS, HealthApp
from penstock.gateway.http.doorman import Doorman
from penstock.gateway.http.server import serve_door
from penstock.wire.credentials.certificates import Certificates

HEALTHY = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
MOST = 4  # connections


class Door:
    """One that is open, and what it finds wrong."""

    def __init__(self, limits: Limits, opened: socket.socket) -> None:
        self.found = ""
        self.registry = CollectorRegistry()
        Counter("things", "Some", registry=self.registry)
        self.guard = Guard()
        self.guard.keys_changed(KeyTable(b"", is_asking=False))
        self.app = HealthApp(Doorman(Config(), self.guard), self._problem, lambda: self.registry)
        self.port = opened.getsockname()[1]
        self.close = serve_door(self.app, opened, limits, MOST, Certificates())

    @classmethod
    async def open(cls, limits: Limits) -> "Door":
        return cls(limits, await open_own_socket("127.0.0.1", "health.http_port", 0))

    async def _problem(self) -> str:
        return self.found

    async def ask(self, request: bytes) -> bytes:
        """Sends the bytes, and reads until the door closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        sent = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{sent}\r\n"
        head, _, body = (await self.ask(request.encode())).partition(b"\r\n\r\n")
        return int(head.split()[1]), body


@pytest.fixture
def limits() -> Limits:
    return Limits().model_copy(update={**LIMITS, "client_share": 1.0})


@pytest.fixture
async def door(limits: Limits) -> AsyncIterator[Door]:
    made = await Door.open(limits)
    yield made
    await made.close()


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
    known = {"good": Principal("p", scopes=MEASURING), "other": Principal("o", scopes=INFERRING)}
    door.guard.keys_changed(KeyTable(b"", further=known))
    for key, status in (("wrong", 401), ("other", 403), ("good", 200)):
        told, text = await door.get("/metrics", x_api_key=key)
        assert (told, b"things" in text) == (status, status == 200)
        assert (await door.get("/healthz"))[0] == (await door.get("/readyz"))[0] == 200
    answer = await door.ask(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert b"www-authenticate: Basic" in answer, "a browser asks its user"


async def test_a_bug_closes_no_door(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> CollectorRegistry:
        raise RuntimeError("a bug")

    monkeypatch.setattr(door.app, "_registry", fail)
    assert (await door.get("/metrics"))[0] == 500
    assert (await door.get("/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /healthz HTTP/1.1\r\nconnection: close\r\n\r\n", b"405"),
        (b"GET /healthz HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", b"421"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", b"431"),
        (HEALTHY * 100, b"200"),
        (b"HEAD /healthz HTTP/1.1\r\nconnection: close\r\n\r\n", b"200"),
    ],
)
async def test_what_is_sent_to_it(door: Door, request_bytes: bytes, status: bytes) -> None:
    assert (await door.ask(request_bytes)).startswith(b"HTTP/1.1 " + status)


async def test_who_is_slow_is_let_go(limits: Limits) -> None:
    door = await Door.open(limits.model_copy(update={"header_timeout_s": 0.05}))
    assert (await door.ask(b"GET /healthz HT")).startswith(b"HTTP/1.1 408")
    await door.close()


async def test_few_connections_at_once(door: Door) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(MOST)]
    for reader, writer in idle:  # it has heard of each
        writer.write(HEALTHY.replace(b"connection: close\r\n", b""))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert (await door.ask(HEALTHY)).startswith(b"HTTP/1.1 429")
    for _, writer in idle:
        writer.close()
    while (await door.ask(HEALTHY)).startswith(b"HTTP/1.1 429"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
