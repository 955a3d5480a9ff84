"""Connections to the edge: HTTP/3 over UDP, and the limit for each client address."""

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from benchmarks.suite.access import make_key
from benchmarks.waiting import eventually
from tests.http3 import http3
from tests.servers import floats_json, write_factor
from tests.tls import TestAuthority, TlsServer

WAIT_S = 60.0
MOST_OF_ONE = 8
INFER = "/v2/models/factor/infer"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("authority") / "certs")


@pytest.fixture(scope="module")
def server(authority: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    folder = tmp_path_factory.mktemp("edge")
    write_factor(folder / "models", "factor", 2.0)
    limits = {"max_connections": 64, "client_share": MOST_OF_ONE / 64}
    settings = authority.settings() | {"access": {"keys": "required"}, "edge_http3": True, "limits": limits}
    with TlsServer(authority, folder / "models", folder, settings) as running:
        yield running
        assert not running.tracebacks()


async def test_http3_is_offered_and_served(server: TlsServer, authority: TestAuthority) -> None:
    key = make_key(server.log.parent / "data")
    async with httpx.AsyncClient(base_url=server.http_url, verify=authority.context()) as client:
        answer = await client.post(INFER, json=floats_json(3.0), headers={"x-api-key": key})
    assert answer.headers["alt-svc"] == f'h3=":{server.http_port}"; ma=86400'
    body = json.dumps(floats_json(3.0)).encode()
    async with http3(server.http_port, authority.ca) as over_udp:
        found = await over_udp.ask("POST", INFER, body, {"x-api-key": key})
        assert found.status == 200
        assert json.loads(found.body)["outputs"] == answer.json()["outputs"]
        forged = {"x-penstock-client": "10.0.0.7:1", "x-penstock-server": "native"}
        assert (await over_udp.ask("POST", INFER, body, forged)).status == 401
        assert (await over_udp.ask("GET", "/v2/health/ready")).status == 200


def test_an_address_has_a_limited_number_of_connections(server: TlsServer) -> None:
    with ExitStack() as stack:
        for source in ("127.0.0.8", "127.0.0.9"):  # the connections of one address do not keep others out
            opened = [stack.enter_context(connect(server.http_port, source)) for _ in range(MOST_OF_ONE + 3)]
            eventually(lambda: len(closed(opened)) == 3, "three are closed", WAIT_S)  # noqa: B023
            assert not is_open(server.grpc_port, source)  # both ports count together
        next(each for each in opened if each not in closed(opened)).close()
        eventually(lambda: is_open(server.grpc_port, "127.0.0.9"), "a connection that ended counts no more", WAIT_S)


def connect(port: int, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S, source_address=(source, 0))


def closed(connections: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that the server has closed."""
    return [each for each in connections if each.fileno() >= 0 and is_closed(each)]


def is_closed(opened: socket.socket) -> bool:
    opened.setblocking(False)
    try:
        return opened.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def is_open(port: int, source: str) -> bool:
    """Return whether a TLS handshake with the edge succeeds."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect(port, source) as opened:
        try:
            with context.wrap_socket(opened):
                return True
        except OSError:  # of which SSLError is one
            return False
