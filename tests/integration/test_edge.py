"""A server behind the edge: which requests it answers, who its clients are, and what the end of a process changes."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from benchmarks.server import ServerProcess
from benchmarks.suite.access import make_key
from benchmarks.waiting import eventually
from penstock.features.edge.envoy_http import SMALL_BYTES
from penstock.pb.blocks.inference_pb2 import BlockInferencePacket
from penstock.pb.blocks.inference_pb2_grpc import BlockInferenceServiceStub
from penstock.pb.inference.grpc_service_pb2 import ModelInferResponse
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.edge.edge_ends import drain, kill
from tests.chaos.report import ChaosPlan
from tests.servers import answered, floats, floats_json, write_factor
from tests.tls import TestAuthority, TlsServer

WAIT_S = 60.0
PRINCIPALS = {"alice@example.com": ["inference"]}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    found = TestAuthority(tmp_path_factory.mktemp("authority") / "certs")
    for name in (*PRINCIPALS, "mallory@example.com"):
        found.issue(name, is_client=True)
    return found


@pytest.fixture(scope="module")
def server(authority: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    folder = tmp_path_factory.mktemp("edge")
    write_factor(folder / "models", "factor", 2.0)
    settings = authority.settings(client_auth="optional", principals=PRINCIPALS)
    settings["access"] = {"anonymous_limits": {"requests_per_s": 1000}}
    with TlsServer(authority, folder / "models", folder, settings) as running:
        yield running
        assert not running.tracebacks()


def grpc_code(server: ServerProcess, authority: TestAuthority, name: str, *metadata: tuple[str, str]) -> str:
    """Return the status of a small and of a large call of this caller, which have different servers."""
    codes = set()
    with authority.channel(server.grpc, name) as channel:
        for count in (1, SMALL_BYTES):
            try:
                call = GRPCInferenceServiceStub(channel).ModelInfer
                found = answered(call(floats("factor", *[3.0] * count), metadata=metadata, timeout=WAIT_S))
                assert found == [6.0] * count
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    (code,) = codes
    return code


def rest_code(server: TlsServer, authority: TestAuthority, name: str, port: int, **headers: str) -> int:
    context = authority.context(name)
    with httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=WAIT_S) as client:
        return client.post("/v2/models/factor/infer", json=floats_json(3.0), headers=headers).status_code


def test_both_ports_identify_callers_by_their_certificates(server: TlsServer, authority: TestAuthority) -> None:
    for port in (server.http_port, server.grpc_port):
        assert rest_code(server, authority, "alice@example.com", port) == 200
        assert rest_code(server, authority, "mallory@example.com", port) == 401
        assert rest_code(server, authority, "", port) == 401
    assert grpc_code(server, authority, "alice@example.com") == "OK"
    assert grpc_code(server, authority, "mallory@example.com") == "UNAUTHENTICATED"
    assert grpc_code(server, authority, "") == "UNAUTHENTICATED"


def test_clients_cannot_forge_an_identity(server: TlsServer, authority: TestAuthority) -> None:
    certificate = (authority.folder / "alice@example.com.pem").read_text().replace("\n", "%0A").replace(" ", "%20")
    forged = {
        "x-penstock-certificate": certificate,
        "X-Penstock-Client": "127.0.0.9:1",
        "x-penstock-server": "native",
        "x-forwarded-client-cert": f'Cert="{certificate}"',
    }
    for name in ("", "mallory@example.com"):
        assert rest_code(server, authority, name, server.http_port, **forged) == 401
        metadata = [(key.lower(), value) for key, value in forged.items()]
        assert grpc_code(server, authority, name, *metadata) == "UNAUTHENTICATED"


def test_small_messages_go_to_the_native_server(server: TlsServer, authority: TestAuthority) -> None:
    key = ("x-api-key", make_key(server.log.parent / "data"))
    assert rest_code(server, authority, "", server.http_port, **dict([key])) == 200
    with authority.channel(server.grpc) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer
        for count, is_compressed, name in (
            (1, False, "native"),
            (SMALL_BYTES // 4 - 100, False, "native"),
            (SMALL_BYTES // 4, False, "large"),
            (3 * SMALL_BYTES, False, "large"),
            (1, True, "grpc"),
        ):
            before = requests_of(server, name)
            compression = grpc.Compression.Gzip if is_compressed else grpc.Compression.NoCompression
            numbers = floats("factor", *[3.0] * count)
            assert len(answered(call(numbers, metadata=[key], timeout=WAIT_S, compression=compression))) == count
            assert requests_of(server, name) == before + 1, (count, is_compressed)


def test_the_first_byte_of_a_small_message_may_come_late(server: TlsServer, authority: TestAuthority) -> None:
    """A call is held until its message is complete, also if the message arrives in parts."""
    key = make_key(server.log.parent / "data", name="late")
    message = floats("factor", 3.0).SerializeToString()
    with authority.channel(server.grpc) as channel:
        calls = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")

        def late() -> Iterator[bytes]:
            time.sleep(0.2)
            yield message

        found = calls(late(), metadata=[("x-api-key", key)], timeout=WAIT_S)
    assert answered(ModelInferResponse.FromString(found)) == [6.0]


def packet_codes(server: TlsServer, authority: TestAuthority, key: str) -> tuple[str, int]:
    """Return the gRPC and the HTTP status of a packet from the holder of a key."""
    data = {"inputs": {"x": [[3.0]]}}
    body = {"block_id": "factor", "session_id": "s", "data": data}
    found = {}
    with authority.channel(server.grpc) as channel:
        packet = BlockInferencePacket(block_id="factor", session_id="s", data=json.dumps(data))
        try:
            call = BlockInferenceServiceStub(channel).infer
            found = json.loads(call(packet, metadata=[("x-api-key", key)], timeout=WAIT_S).data)
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
    context, headers = authority.context(), {"x-api-key": key}
    with httpx.Client(base_url=server.http_url, verify=context, headers=headers, timeout=WAIT_S) as client:
        answer = client.post("/v1/infer", json=body)
    if answer.status_code == 200:
        assert found == answer.json()["data"] == {"outputs": {"y": [[6.0]]}}
    return code, answer.status_code


def test_packets_need_a_key_that_may_use_their_block(server: TlsServer, authority: TestAuthority) -> None:
    data_dir = server.log.parent / "data"
    assert packet_codes(server, authority, make_key(data_dir, name="packets")) == ("OK", 200)
    assert packet_codes(server, authority, "psk_wrong") == ("UNAUTHENTICATED", 401)
    assert packet_codes(server, authority, make_key(data_dir, name="other", models=["other"])) == ("NOT_FOUND", 404)


def requests_of(server: ServerProcess, cluster: str) -> int:
    """Return the number of requests that Envoy has sent to the gateways' server of this name."""
    (folder,) = {Path(each).parent for each in psutil.Process(server.edge_pid()).cmdline() if "edge-envoy" in each}
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(str(folder / "edge-admin"))
        path = f"/stats?filter=^cluster.{cluster}.upstream_rq_total$"
        opened.sendall(f"GET {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n\r\n".encode())
        found = b"".join(iter(lambda: opened.recv(65536), b""))
    return int(found.split(b"upstream_rq_total: ")[1].split()[0])


def test_the_metrics_show_the_figures_of_the_edge(server: TlsServer, authority: TestAuthority) -> None:
    assert rest_code(server, authority, "alice@example.com", server.http_port) == 200
    key = make_key(server.log.parent / "data", "metrics")

    def is_counted() -> bool:
        context, headers = authority.context(), {"x-api-key": key}
        with httpx.Client(base_url=server.http_url, verify=context, headers=headers, timeout=WAIT_S) as client:
            found = client.get("/metrics").text
        figures = dict(line.rsplit(" ", 1) for line in found.splitlines() if line.startswith("penstock_edge_"))
        # Neither is there before the gateway knows the key and Envoy was asked.
        requests, memory = (
            float(figures.get(f'penstock_edge_{name}{{edge="edge"}}', 0)) for name in ("requests_total", "memory_bytes")
        )
        return requests > 0 and memory > 1e6

    eventually(is_counted, "the edge's figures are in the metrics", WAIT_S)


def test_a_server_on_open_loopback_has_no_edge(tmp_path: Path) -> None:
    write_factor(tmp_path / "models", "factor", 2.0)
    with ServerProcess(tmp_path / "models", tmp_path / "server") as running:
        assert not [each for each in running.family() if each.name() == "envoy"]
        assert running.status()["grpc_server"]["server"] == "native"


async def test_clients_are_answered_soon_after_envoy_was_killed(tmp_path: Path) -> None:
    found = await kill(ChaosPlan(tmp_path, tmp_path, is_quick=True))
    assert found.figures["edge_kill_back_s"] < WAIT_S
    assert found.figures["edge_kill_tracebacks"] == 0


def test_an_envoy_that_hangs_is_replaced(server: TlsServer, authority: TestAuthority) -> None:
    before = server.edge_pid()
    os.kill(before, signal.SIGSTOP)
    eventually(lambda: edge_pids(server) not in ([], [before]), "a new Envoy runs", WAIT_S)
    eventually(lambda: is_answered(server, authority), "requests are answered again", WAIT_S)


def edge_pids(server: ServerProcess) -> list[int]:
    return [each.pid for each in psutil.Process(server.pid).children() if each.name() == "envoy"]


def is_answered(server: TlsServer, authority: TestAuthority) -> bool:
    try:
        return rest_code(server, authority, "alice@example.com", server.http_port) == 200
    except httpx.HTTPError:
        return False


async def test_no_request_fails_when_the_server_is_stopped(tmp_path: Path) -> None:
    found = await drain(ChaosPlan(tmp_path, tmp_path, is_quick=True))
    assert not found.missed(), found.details
    assert "SIGTERM" not in read_log(tmp_path / "drain"), "a stop that was asked for is no warning"


def read_log(folder: Path) -> str:
    (log,) = folder.glob("*.log")
    return log.read_text()


def test_envoy_ends_with_a_killed_server(tmp_path: Path) -> None:
    write_factor(tmp_path / "models", "factor", 2.0)
    running = ServerProcess(tmp_path / "models", tmp_path / "server", settings={"edge": "envoy"})
    try:
        envoy = psutil.Process(running.edge_pid())
        os.kill(running.pid, signal.SIGKILL)
        running.process.wait(WAIT_S)
        eventually(lambda: not envoy.is_running() or envoy.status() == "zombie", "Envoy has ended", WAIT_S)
    finally:
        running.end()


def test_gateways_work_behind_a_proxy_of_the_user(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sockets = tmp_path_factory.mktemp("s")
    sockets.chmod(0o700)
    write_factor(tmp_path / "models", "factor", 2.0)
    server = ProxiedServer(tmp_path / "models", tmp_path / "server", sockets)
    with server, server.client() as client:
        answer = client.post(
            "/v2/models/factor/infer", json=floats_json(3.0), headers={"x-penstock-client": "10.0.0.7:1"}
        )
        assert answer.json()["outputs"][0]["data"] == [6.0]
        with grpc.insecure_channel(f"unix:{sockets}/gateway-0-grpc") as channel:
            assert answered(GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S)) == [
                6.0
            ]


class ProxiedServer(ServerProcess):
    """A server whose gateways open unix sockets and no ports."""

    def __init__(self, models: Path, folder: Path, sockets: Path) -> None:
        self._sockets = sockets
        super().__init__(models, folder, settings={"edge_sockets": str(sockets)})

    def client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=f"{self._sockets}/gateway-0-http")
        return httpx.Client(base_url="http://localhost", transport=transport, timeout=WAIT_S)

    def _is_ready(self, http: str) -> bool:
        try:
            with self.client() as client:
                return client.get("/v2/health/ready").status_code == 200
        except httpx.HTTPError:
            return False
