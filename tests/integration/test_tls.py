"""A server's endpoints over TLS: plain connections are refused, limits hold, certificates are replaced under load."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import grpc
import httpx
import psutil
import pytest
from websockets.asyncio.client import connect

from benchmarks.waiting import eventually
from penstock.client import Client
from penstock.core.errors import Unavailable
from penstock.core.tensors import pack_bytes
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1.access_pb2 import DiscoverRequest
from penstock.pb.v1.access_pb2_grpc import DirectStub
from tests.servers import answered, floats, floats_json, write_factor, write_identity
from tests.tls import TestAuthority, TlsServer

WAIT_S = 30.0
HEADERS_S = 2.0
ROTATIONS = 4


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("authority") / "certs")


@pytest.fixture(scope="module")
def server(authority: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    folder = tmp_path_factory.mktemp("tls")
    write_factor(folder / "models", "factor", 2.0)
    write_identity(folder / "models", "bytes", "BYTES")
    write_identity(folder / "models", "numbers", "FP32")
    settings = {
        **authority.settings(client_auth="optional"),
        "limits": {
            "header_timeout_s": HEADERS_S,
            "answer_timeout_s": 1.0,
            "max_header_bytes": 4096,
            "max_connections": 64,
        },
    }
    with TlsServer(authority, folder / "models", folder, settings) as running:
        yield running
        assert not running.tracebacks()


def secured(server: TlsServer, authority: TestAuthority) -> ssl.SSLSocket:
    opened = socket.create_connection(("127.0.0.1", server.http_port), WAIT_S)
    return authority.context().wrap_socket(opened, server_hostname="localhost")


def read_all(opened: socket.socket) -> bytes:
    """Read until the connection is closed, cleanly or not."""
    found = b""
    try:
        while piece := opened.recv(65536):
            found += piece
    except (ConnectionError, ssl.SSLError):
        pass
    return found


def ask_grpc(server: TlsServer, authority: TestAuthority) -> float:
    with authority.channel(server.grpc) as channel:
        (found,) = answered(GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S))
        return found


def ask_http(client: httpx.Client) -> float:
    answer = client.post("/v2/models/factor/infer", json=floats_json(3.0))
    assert answer.status_code == 200, answer.text
    return float(answer.json()["outputs"][0]["data"][0])


def test_a_workers_endpoint_uses_tls_like_the_other_endpoints(server: TlsServer, authority: TestAuthority) -> None:
    with authority.channel(server.grpc) as channel:
        way = DirectStub(channel).Discover(DiscoverRequest(model="factor"), timeout=WAIT_S)
    assert way.is_tls
    (worker,) = server.children("worker").values()
    assert [each.name() for each in psutil.Process(worker).children()] == ["envoy"]
    with authority.channel(way.address) as channel:
        assert answered(GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S)) == [6.0]
    with grpc.insecure_channel(way.address) as channel, pytest.raises(grpc.RpcError):
        GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S)


def test_clients_are_served_over_tls(server: TlsServer, authority: TestAuthority) -> None:
    assert ask_grpc(server, authority) == 6.0
    with httpx.Client(base_url=server.http_url, verify=authority.context()) as client:
        assert ask_http(client) == 6.0
        assert client.get("/v1/status").status_code == 200
        assert client.get("/nothing").status_code == 404


async def test_websockets_work_over_tls(server: TlsServer, authority: TestAuthority) -> None:
    url = f"wss://localhost:{server.http_port}/v2/models/bytes/stream?input=x&output=y"
    async with asyncio.timeout(WAIT_S), connect(url, ssl=authority.context(), compression=None) as opened:
        await opened.send(b"a frame")
        assert await opened.recv() in (b"a frame", pack_bytes([b"a frame"]))


def test_plain_clients_are_refused_and_told_about_tls(server: TlsServer) -> None:
    plain = f"http://127.0.0.1:{server.http_port}"
    refused = httpx.get(f"{plain}/v2/health/live", timeout=WAIT_S)
    assert refused.status_code == 400
    assert "this port uses TLS: write https://" in refused.json()["error"]["message"]
    assert httpx.post(f"{plain}/v2/models/factor/infer", json=floats_json(1.0), timeout=WAIT_S).status_code == 400
    with Client(server.grpc) as client, pytest.raises(Unavailable, match="If that port uses TLS"):
        client.models()
    for words in (("status",), ("infer", "factor", "-i", "x=[1]")):
        command = [sys.executable, "-m", "penstock", *words, "--server", plain]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert said.returncode == 2
        assert "TLS" in said.stderr
    # An authority that is not trusted is named as the reason, with the option that trusts it.
    command = [sys.executable, "-m", "penstock", "status", "--server", plain.replace("http:", "https:")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "--ca" in said.stderr
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as failed:
        GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", server.http_port), WAIT_S) as opened:
        opened.sendall(b"nothing of TLS" * 100)
        assert b"HTTP" not in read_all(opened)


def test_a_certificate_of_another_authority_is_refused(
    server: TlsServer, authority: TestAuthority, tmp_path: Path
) -> None:
    stranger = TestAuthority(tmp_path / "stranger")
    context = authority.context()
    context.load_cert_chain(stranger.files("server").cert, stranger.files("server").key)
    with pytest.raises(httpx.HTTPError), httpx.Client(base_url=server.http_url, verify=context) as client:
        client.get("/v2/health/live")


def test_connection_limits_apply_over_tls(server: TlsServer, authority: TestAuthority) -> None:
    """Connections that never start a handshake count too, and are closed in time."""
    silent = [socket.create_connection(("127.0.0.1", server.http_port), WAIT_S) for _ in range(80)]
    try:
        assert read_all(silent[-1]) == b""  # one too many from this address
        assert read_all(silent[0]) == b""  # after the time limit for the first bytes of a request
        with httpx.Client(base_url=server.http_url, verify=authority.context()) as client:
            assert ask_http(client) == 6.0
    finally:
        for opened in silent:
            opened.close()


def test_slow_and_large_headers_are_refused_with_an_answer(server: TlsServer, authority: TestAuthority) -> None:
    with secured(server, authority) as slow, secured(server, authority) as large:
        slow.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n")
        large.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"y" * 5000 + b"\r\n\r\n")
        assert b" 431 " in read_all(large).split(b"\r\n")[0]
        assert b" 408 " in read_all(slow).split(b"\r\n")[0]


def test_connections_with_unread_answers_are_closed_over_tls(server: TlsServer, authority: TestAuthority) -> None:
    """Most of the answer waits below TLS.

    No other connection is left, so the time limit must be checked without new traffic.
    """
    numbers = 4_000_000
    tensor = {"name": "x", "shape": [1, numbers], "datatype": "FP32", "parameters": {"binary_data_size": 4 * numbers}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/numbers/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(head) + 4 * numbers}\r\n"
    )
    lines += f"inference-header-content-length: {len(head)}\r\n\r\n"
    edge = server.edge_pid()
    with secured(server, authority) as opened:
        opened.sendall(lines.encode() + head + bytes(4 * numbers))
        assert opened.recv(15) == b"HTTP/1.1 200 OK"
        port = opened.getsockname()[1]

        def is_closed() -> bool:
            return port not in [getattr(each.raddr, "port", 0) for each in psutil.Process(edge).connections()]

        eventually(is_closed, "the edge has closed it", WAIT_S)
        assert len(read_all(opened)) < 4 * numbers


def test_certificates_are_replaced_under_load_without_a_failure(server: TlsServer, authority: TestAuthority) -> None:
    is_over = Event()

    def over_http() -> int:
        """Send requests; every second one uses a new connection."""
        asked = 0
        with httpx.Client(base_url=server.http_url, verify=authority.context(), timeout=WAIT_S) as kept:
            while not is_over.is_set():
                assert ask_http(kept) == 6.0
                with httpx.Client(base_url=server.http_url, verify=authority.context(), timeout=WAIT_S) as fresh:
                    assert ask_http(fresh) == 6.0
                asked += 2
        return asked

    def over_grpc() -> int:
        asked = 0
        with authority.channel(server.grpc) as kept:
            stub = GRPCInferenceServiceStub(kept)
            while not is_over.is_set():
                assert answered(stub.ModelInfer(floats("factor", 3.0), timeout=WAIT_S)) == [6.0]
                assert ask_grpc(server, authority) == 6.0
                asked += 2
        return asked

    shown = {serial(server.http_port, authority)}
    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(call) for call in (over_http, over_grpc, over_http, over_grpc)]
        try:
            for _ in range(ROTATIONS):
                before = serial(server.http_port, authority)
                authority.issue("server", "localhost", "127.0.0.1")
                until = time.monotonic() + WAIT_S
                while {serial(port, authority) for port in (server.http_port, server.grpc_port)} & {before}:
                    assert time.monotonic() < until, "the new certificate is shown"
                    time.sleep(0.1)
                shown.add(serial(server.http_port, authority))
        finally:
            is_over.set()
        assert all(caller.result(WAIT_S) > 0 for caller in callers)
    assert len(shown) == ROTATIONS + 1


def serial(port: int, authority: TestAuthority) -> str:
    context = authority.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), WAIT_S) as opened,
        context.wrap_socket(opened, server_hostname="localhost") as shown,
    ):
        found = shown.getpeercert()
        assert found is not None
        return str(found["serialNumber"])
