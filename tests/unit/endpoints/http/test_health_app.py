"""The health endpoint over HTTP: its answers, and its limits."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.app.ports import open_unshared_socket
from penstock.core.config import Config, Limits
from penstock.core.principals import INFERENCE_SCOPES, METRICS_SCOPES, Principal
from penstock.endpoints.guard import Guard
from penstock.endpoints.http.health_app import LIMITS, HealthApp
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.endpoints.http.http_server import serve_app
from penstock.features.keys.key_table import KeyTable
from penstock.wire.credentials.certificates import Certificates

HEALTHY = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
MOST = 4  # connections


class Endpoint:
    """An open health endpoint, and the problem that it reports."""

    def __init__(self, limits: Limits, opened: socket.socket) -> None:
        self.found = ""
        self.registry = CollectorRegistry()
        Counter("things", "Some", registry=self.registry)
        self.guard = Guard()
        self.guard.set_keys(KeyTable(b"", needs_key=False))
        self.app = HealthApp(HttpGuard(Config(), self.guard), self._problem, lambda: self.registry)
        self.port = opened.getsockname()[1]
        self.close = serve_app(self.app, opened, limits, MOST, Certificates())

    @classmethod
    async def open(cls, limits: Limits) -> "Endpoint":
        return cls(limits, await open_unshared_socket("127.0.0.1", "health.http_port", 0))

    async def _problem(self) -> str:
        return self.found

    async def ask(self, request: bytes) -> bytes:
        """Send the bytes, and read until the endpoint closes."""
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
async def endpoint(limits: Limits) -> AsyncIterator[Endpoint]:
    made = await Endpoint.open(limits)
    yield made
    await made.close()


async def test_readyz_reports_the_state_of_the_role(endpoint: Endpoint) -> None:
    assert await endpoint.get("/healthz") == (200, b'{"status":"alive"}')
    assert await endpoint.get("/readyz") == (200, b'{"status":"ready"}')
    endpoint.found = "it is shutting down"
    assert await endpoint.get("/readyz?verbose") == (503, b'{"status":"not ready","reason":"it is shutting down"}')
    assert (await endpoint.get("/healthz"))[0] == 200
    status, text = await endpoint.get("/metrics")
    assert (status, b"things_total" in text) == (200, True)
    assert (await endpoint.get("/else"))[0] == 404


async def test_metrics_require_a_key_and_health_does_not(endpoint: Endpoint) -> None:
    known = {"good": Principal("p", scopes=METRICS_SCOPES), "other": Principal("o", scopes=INFERENCE_SCOPES)}
    endpoint.guard.set_keys(KeyTable(b"", further=known))
    for key, status in (("wrong", 401), ("other", 403), ("good", 200)):
        told, text = await endpoint.get("/metrics", x_api_key=key)
        assert (told, b"things" in text) == (status, status == 200)
        assert (await endpoint.get("/healthz"))[0] == (await endpoint.get("/readyz"))[0] == 200
    answer = await endpoint.ask(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert b"www-authenticate: Basic" in answer, "a browser asks its user for the key"


async def test_a_bug_does_not_close_the_endpoint(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> CollectorRegistry:
        raise RuntimeError("a bug")

    monkeypatch.setattr(endpoint.app, "_get_registry", fail)
    assert (await endpoint.get("/metrics"))[0] == 500
    assert (await endpoint.get("/healthz"))[0] == 200


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
async def test_unknown_paths_and_methods_are_refused(endpoint: Endpoint, request_bytes: bytes, status: bytes) -> None:
    assert (await endpoint.ask(request_bytes)).startswith(b"HTTP/1.1 " + status)


async def test_slow_clients_are_disconnected(limits: Limits) -> None:
    endpoint = await Endpoint.open(limits.model_copy(update={"header_timeout_s": 0.05}))
    assert (await endpoint.ask(b"GET /healthz HT")).startswith(b"HTTP/1.1 408")
    await endpoint.close()


async def test_the_number_of_connections_is_limited(endpoint: Endpoint) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(MOST)]
    for reader, writer in idle:  # the endpoint has seen each connection
        writer.write(HEALTHY.replace(b"connection: close\r\n", b""))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert (await endpoint.ask(HEALTHY)).startswith(b"HTTP/1.1 429")
    for _, writer in idle:
        writer.close()
    while (await endpoint.ask(HEALTHY)).startswith(b"HTTP/1.1 429"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
