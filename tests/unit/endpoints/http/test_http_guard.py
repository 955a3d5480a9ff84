"""The guard for HTTP: it accepts known hosts, and refuses pages of other sites unless they are allowed."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from penstock.core.config import Config, Limits
from penstock.core.errors import Forbidden, UnknownHost
from penstock.endpoints.guard import create_open_guard
from penstock.endpoints.http.http_guard import HttpGuard
from penstock.gateway.http_app import create_http_server
from penstock.wire.credentials.certificates import Certificates
from tests.unit.conftest import Served

LOCAL = Config()
OPEN = Config(host="0.0.0.0", insecure=True)
INFER = "/v2/models/add/infer"


def refusal(method: str, config: Config = LOCAL, /, **headers: str) -> str | None:
    http_guard = HttpGuard(config, create_open_guard(), names=("gpu-box",))
    given = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    error = http_guard.find_refusal(given, method)
    assert error is None or type(error) in (Forbidden, UnknownHost)
    return None if error is None else error.code


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "LocalHost.:1", "app.localhost", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", ""],
)
def test_names_and_addresses_of_this_machine_are_accepted(host: str) -> None:
    assert refusal("POST", host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"),
        *("gpu-box", "192.0.2.1", "localhost:x@evil.example", "[::1", "127.0.0.1@evil.example", "a\xe4", "localhost/x"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", ""])
def test_other_hosts_are_refused(host: str, method: str) -> None:
    assert refusal(method, host=host) == "unknown_host"


def test_a_missing_host_is_accepted() -> None:
    assert refusal("GET") is None


def test_every_host_header_must_be_known() -> None:
    pair = [(b"host", b"evil.example"), (b"host", b"localhost")]
    assert isinstance(HttpGuard(Config(), create_open_guard()).find_refusal(pair, "GET"), UnknownHost)
    assert isinstance(HttpGuard(Config(), create_open_guard()).find_refusal(pair[::-1], "GET"), UnknownHost)


@pytest.mark.parametrize("host", ["192.0.2.1:8080", "[2001:db8::1]:8080", "10.1.2.3", "gpu-box:8080", "localhost"])
def test_beyond_loopback_addresses_and_the_machine_s_name_are_known(host: str) -> None:
    """Addresses are accepted, because DNS rebinding needs a name, and pods are probed at their address."""
    assert refusal("GET", OPEN, host=host) is None


@pytest.mark.parametrize("host", ["evil.example", "penstock.svc", "10.1.2.3.evil.example"])
def test_beyond_loopback_other_names_are_refused(host: str) -> None:
    assert refusal("GET", OPEN, host=host) == "unknown_host"


@pytest.mark.parametrize(
    ("allowed", "host"),
    [("Penstock.svc", "penstock.SVC:80"), ("*.example.com", "a.b.example.com"), ("*", "anything.at.all")],
)
def test_allowed_hosts_adds_names(allowed: str, host: str) -> None:
    assert refusal("POST", Config(allowed_hosts=(allowed,)), host=host) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", ""])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost"},
        {"origin": "file://localhost:8080"},
        {"origin": "http://localhost:8080.evil.example"},
        {"origin": "http://localhost:8080", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_pages_of_other_sites_are_refused(method: str, headers: dict[str, str]) -> None:
    assert refusal(method, LOCAL, host="localhost:8080", **headers) == "forbidden"
    assert refusal("GET", LOCAL, host="localhost:8080", **headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8080"},
        {"origin": "https://LOCALHOST:8080", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
    ],
)
def test_programs_and_own_pages_are_accepted(headers: dict[str, str]) -> None:
    assert refusal("POST", LOCAL, host="localhost:8080", **headers) is None


def test_a_page_is_refused_without_a_host_header() -> None:
    assert refusal("POST", origin="http://localhost:8080") == "forbidden"


@pytest.mark.parametrize("origin", ["https://app.example", "null"])
def test_allowed_origins_adds_sites(origin: str) -> None:
    headers = {"host": "localhost", "origin": origin, "sec_fetch_site": "cross-site"}
    assert refusal("POST", Config(allowed_origins=(origin + "/",)), **headers) is None
    assert refusal("POST", Config(allowed_origins=("*",)), **headers) is None
    assert refusal("POST", Config(allowed_origins=("https://other.example",)), **headers) == "forbidden"


def opened(served: Served, config: Config) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=served.build_app(config), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8080")


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/v1/status", "/v2/health/ready", "/nowhere"])
async def test_every_route_checks_the_host(served: Served, path: str) -> None:
    async with opened(served, Config()) as client:
        answer = await client.get(path, headers={"host": "evil.example"})
    assert (answer.status_code, answer.headers["penstock-code"]) == (421, "unknown_host")
    assert "--allowed-host" in answer.text


async def test_a_page_of_another_site_cannot_unload_a_model(served: Served) -> None:
    async with opened(served, Config()) as client:
        path, headers = "/v2/repository/models/add/unload", {"origin": "http://evil.example"}
        answer = await client.post(path, content="{}", headers={**headers, "content-type": "text/plain"})
    assert (answer.status_code, answer.headers["penstock-code"]) == (403, "forbidden")
    assert "--allowed-origin" in answer.json()["error"]
    assert "access-control-allow-origin" not in answer.headers
    assert served.control.calls == []


async def test_allowed_origins_get_cors_headers(served: Served) -> None:
    ours, other = {"origin": "https://app.example"}, {"origin": "https://other.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-request-id"}
    async with opened(served, Config(allowed_origins=("https://app.example",))) as client:
        allowed, refused = [await client.options(INFER, headers={**each, **asked}) for each in (ours, other)]
        answer = await client.post("/v2/repository/index", headers=ours)
        foreign = await client.post("/v2/repository/index", headers=other)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert allowed.headers["access-control-allow-headers"] == "content-type,x-request-id"
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert (foreign.status_code, "access-control-allow-origin" in foreign.headers) == (403, False)


@asynccontextmanager
async def listening(served: Served) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """Start a server, and yield a function that sends bytes and returns the answer."""
    endpoint = socket.create_server(("127.0.0.1", 0))
    server = create_http_server(served.app, Limits(), served.admission, Certificates())
    task = asyncio.create_task(server.serve(sockets=[endpoint]))

    async def say(message: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*endpoint.getsockname())
        writer.write(message)
        found = await reader.readuntil(b"\r\n")
        writer.close()
        return found

    try:
        yield say
    finally:
        server.should_exit = True
        await task


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"host: localhost", b"200"),
        (b"host: evil.example", b"421"),
        (b"host: evil.example\r\nhost: localhost", b"421"),
        (b"host: localhost\r\norigin: null", b"403"),
        (b"host: localhost\r\norigin: http://localhost", b"200"),
        (b"host: localhost\r\nsec-fetch-site: cross-site", b"403"),
    ],
)
async def test_the_short_path_checks_host_and_origin(served: Served, headers: bytes, status: bytes) -> None:
    body = b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
    async with listening(served) as say:
        answer = await say(
            b"POST %s HTTP/1.1\r\n%s\r\ncontent-length: %d\r\n\r\n%s" % (INFER.encode(), headers, len(body), body)
        )
    assert answer.split()[1] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"host: localhost\r\norigin: http://evil.example", b"403"),
        (b"host: evil.example\r\norigin: http://evil.example", b"421"),
        (b"host: localhost\r\norigin: null", b"403"),
    ],
)
async def test_websockets_are_checked_before_their_handshake(served: Served, headers: bytes, status: bytes) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13"
    key = b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
    async with listening(served) as say:
        answer = await say(b"GET /v2/models/add/stream HTTP/1.1\r\n%s\r\n%s\r\n%s\r\n\r\n" % (headers, upgrade, key))
    assert answer.split()[1] == status


async def test_a_websocket_at_an_unknown_path_is_refused(served: Served) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13"
    key = b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
    async with listening(served) as say:
        answer = await say(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n%s\r\n%s\r\n\r\n" % (upgrade, key))
    assert answer.split()[1] == b"404"
