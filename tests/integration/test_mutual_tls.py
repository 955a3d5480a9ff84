"""A cluster that authenticates roles and callers by certificates: a manager, a gateway and a worker."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from benchmarks.waiting import eventually
from penstock.experiments.processes import ChildProcess
from penstock.pb.inference import grpc_service_pb2 as oip
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import cluster_pb2
from penstock.pb.v1 import job_pb2 as pb
from penstock.pb.v1.cluster_pb2_grpc import ClusterStub
from penstock.wire import job_messages
from penstock.wire.sockets import DealerSocket
from penstock.wire.zmq_endpoints import split_key
from tests.servers import answered, floats, floats_json, log_lines, write_factor, write_identity
from tests.tls import TestAuthority

WAIT_S = 60.0
ROLES = {"manager-1": ["join"], "gateway-1": ["join"], "worker-*": ["join"]}
CALLERS = {"alice@example.com": ["inference"], "ops@example.com": ["admin"]}
NOBODY = "mallory@example.com"  # whose certificate is valid, but has no principal
Code: Any = grpc.StatusCode


class SecuredCluster:
    def __init__(self, folder: Path, authority: TestAuthority, stack: ExitStack) -> None:
        self.authority = authority
        self._folder = folder
        self._stack = stack
        self.stranger = TestAuthority(folder / "stranger")
        for name in ("manager-1", "gateway-1", "worker-1"):
            authority.issue(name, "localhost", "127.0.0.1")
        for name in (*CALLERS, NOBODY):
            authority.issue(name, is_client=True)
        self.stranger.issue("alice@example.com", is_client=True)
        models = folder / "models"
        write_factor(models, "factor", 2.0)
        write_identity(models, "bytes", "BYTES")
        told = self._start("manager", "manager_started", "--models", str(models), "--bind", "127.0.0.1:0")
        self.manager = told["address"]
        self.manager_log = folder / "manager.log"
        self.registry = log_line(folder / "manager.log", "registry_listening")["http"]
        self.health = log_line(folder / "manager.log", "health_listening")
        self._start("worker", "", "--join", self.manager)
        ports = ("--http-port", "0", "--grpc-port", "0", "--bind", "127.0.0.1:0")
        endpoint = self._start("gateway", "gateway_started", "--join", self.manager, *ports)
        self.http, self.grpc, self.workers_endpoint = endpoint["http"], endpoint["grpc"], endpoint["workers_endpoint"]
        eventually(lambda: self.is_ready(), "the gateway is ready", WAIT_S)

    def _start(self, role: str, event: str, *flags: str) -> dict[str, Any]:
        settings = self.authority.settings(f"{role}-1", client_auth="required", principals=ROLES | CALLERS)
        config, log = self._folder / f"{role}.yaml", self._folder / f"{role}.log"
        config.write_text(yaml.safe_dump(settings | {"registry": {"http_port": 0}}))
        command = [sys.executable, "-m", "penstock", role, "--node", "here", "--config", str(config), *flags]
        command += ["--data-dir", str(self._folder / role)]
        if role != "gateway":
            command += ["--health-port", "0", "--health-grpc-port", "0"]
        self._stack.enter_context(ChildProcess(command, log))
        return log_line(log, event) if event else {}

    def is_ready(self) -> bool:
        with self.client("alice@example.com") as client:
            return client.get("/v2/health/ready").status_code == 200

    def client(self, name: str) -> httpx.Client:
        return httpx.Client(base_url=self.http, verify=self.authority.context(name), timeout=WAIT_S)

    def channel(self, address: str, name: str) -> grpc.Channel:
        return self.authority.channel(address.replace("127.0.0.1", "localhost"), name)


def log_line(log: Path, event: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [line for line in log_lines(log) if line.get("event") == event]

    eventually(lambda: bool(found()), f"{log} contains '{event}'", WAIT_S)
    return found()[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("secured")
    with ExitStack() as stack:
        yield SecuredCluster(folder, TestAuthority(folder / "certs"), stack)


def asked(cluster: SecuredCluster, name: str) -> Any:
    """Return a gateway's answer to this caller over gRPC."""
    with cluster.channel(cluster.grpc, name) as channel:
        try:
            response = GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code()
        assert answered(response) == [6.0]
        return Code.OK


def managed(cluster: SecuredCluster, name: str, *metadata: tuple[str, str]) -> Any:
    """Return a manager's answer to an operator's request of this caller."""
    with cluster.channel(cluster.manager, name) as channel:
        try:
            request = cluster_pb2.ChangeWorkerRequest(worker_id="here.worker-0", changes='{"is_draining": false}')
            ClusterStub(channel).ChangeWorker(request, timeout=WAIT_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
        return Code.OK


def test_a_certificate_works_like_a_key(cluster: SecuredCluster) -> None:
    assert asked(cluster, "alice@example.com") is Code.OK
    assert asked(cluster, "ops@example.com") is Code.OK
    assert asked(cluster, "worker-1") is Code.PERMISSION_DENIED
    assert asked(cluster, NOBODY) is Code.UNAUTHENTICATED
    assert managed(cluster, "ops@example.com") is Code.OK
    assert managed(cluster, "alice@example.com") is Code.PERMISSION_DENIED
    assert managed(cluster, NOBODY) is Code.UNAUTHENTICATED


def test_callers_of_a_manager_cannot_forge_an_identity(cluster: SecuredCluster) -> None:
    assert log_line(cluster.manager_log, "process_started")["process"] == "manager-edge"
    operator = (cluster.authority.folder / "ops@example.com.pem").read_text().replace("\n", "%0A").replace(" ", "%20")
    forged = (("x-penstock-certificate", operator), ("x-penstock-client", "127.0.0.1:1"))
    assert managed(cluster, NOBODY, *forged) is Code.UNAUTHENTICATED
    assert managed(cluster, "alice@example.com", *forged) is Code.PERMISSION_DENIED
    with httpx.Client(verify=cluster.authority.context(NOBODY), timeout=WAIT_S) as client:
        assert client.get(cluster.registry + "/v1/registry/models", headers=dict(forged)).status_code == 401


def test_a_certificate_works_over_http(cluster: SecuredCluster) -> None:
    found = {}
    for name in ("alice@example.com", "ops@example.com", "worker-1", NOBODY):
        with cluster.client(name) as client:
            short = client.post("/v2/models/factor/infer", json=floats_json(3.0)).status_code
            usual = client.post("/v2/models/factor/infer", json=floats_json(3.0), headers={"expect": ""}).status_code
            found[name] = short, usual, client.get("/metrics").status_code
    assert found == {
        "alice@example.com": (200, 200, 403),
        "ops@example.com": (200, 200, 200),
        "worker-1": (403, 403, 403),
        NOBODY: (401, 401, 401),
    }


async def test_a_certificate_works_over_websockets(cluster: SecuredCluster) -> None:
    url = cluster.http.replace("https", "wss") + "/v2/models/bytes/stream?input=x&output=y"
    async with asyncio.timeout(WAIT_S):
        async with connect(url, ssl=cluster.authority.context("alice@example.com"), compression=None) as opened:
            await opened.send(b"a frame")
            assert await opened.recv()
        for name, status in (("worker-1", 403), (NOBODY, 401)):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, ssl=cluster.authority.context(name), compression=None)
            assert refused.value.response.status_code == status


def test_callers_without_a_certificate_of_the_authority_are_refused(cluster: SecuredCluster) -> None:
    assert asked(cluster, "") is Code.UNAVAILABLE
    assert managed(cluster, "") is Code.UNAVAILABLE
    wrong = cluster.authority.context()
    stranger = cluster.stranger.files("alice@example.com")
    wrong.load_cert_chain(stranger.cert, stranger.key)
    for context in (cluster.authority.context(), wrong):
        for url in (cluster.http, cluster.registry):
            with pytest.raises(httpx.HTTPError), httpx.Client(verify=context, timeout=WAIT_S) as client:
                client.get(f"{url}/v2/health/live")


def test_a_managers_http_endpoints_require_a_certificate(cluster: SecuredCluster) -> None:
    found = {}
    for name in ("ops@example.com", "alice@example.com", NOBODY):
        with httpx.Client(verify=cluster.authority.context(name), timeout=WAIT_S) as client:
            answers = [
                client.get(url)
                for url in (cluster.registry + "/v1/registry/models", cluster.health["http"] + "/metrics")
            ]
            found[name] = [answer.status_code for answer in answers]
    assert found == {"ops@example.com": [200, 200], "alice@example.com": [403, 403], NOBODY: [401, 401]}


def test_health_needs_no_certificate(cluster: SecuredCluster) -> None:
    with httpx.Client(verify=cluster.authority.context(), timeout=WAIT_S) as client:
        assert client.get(cluster.health["http"] + "/readyz").status_code == 200
    with cluster.channel(cluster.health["grpc"], "") as channel:
        grpc.channel_ready_future(channel).result(WAIT_S)


async def test_a_hello_from_an_unknown_worker_is_not_answered(cluster: SecuredCluster) -> None:
    """Try with the gateway's public key, which is not secret, and without any."""
    heard: list[object] = []
    where, key = split_key(cluster.workers_endpoint)
    assert len(key) == 64
    hello = pb.Header(hello=pb.Hello(protocol=job_messages.PROTOCOL, worker_id="mallory"))
    strangers = []
    for endpoint in (where, cluster.workers_endpoint):
        stranger = DealerSocket(heard.append, b"mallory")
        stranger.connect(endpoint)
        stranger.send(job_messages.encode(hello))
        strangers.append(stranger)
    await asyncio.sleep(1.0)
    for stranger in strangers:
        stranger.close()
    assert heard == []
    with cluster.client("ops@example.com") as client:
        assert {each["id"] for each in client.get("/v1/status").json()["workers"]} == {"here.worker-0"}


def test_a_managers_http_endpoints_identify_the_owners_of_certificates(cluster: SecuredCluster) -> None:
    found = {}
    for name in ("ops@example.com", "alice@example.com", NOBODY):
        with httpx.Client(verify=cluster.authority.context(name), timeout=WAIT_S) as client:
            paths = (f"{cluster.registry}/v1/registry/models", f"{cluster.health['http']}/metrics")
            found[name] = [client.get(path).status_code for path in paths]
    assert found == {"ops@example.com": [200, 200], "alice@example.com": [403, 403], NOBODY: [401, 401]}


def test_commands_send_their_certificate(cluster: SecuredCluster, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from penstock.cli.main import app

    config = tmp_path / "ops.yaml"
    config.write_text(yaml.safe_dump(cluster.authority.settings("ops@example.com")))
    flags = ["--server", cluster.manager, "--config", str(config), "--json"]
    result = CliRunner().invoke(app, ["cluster", "status", *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["is_leader"]


def test_public_methods_of_a_gateway_need_no_certificate(cluster: SecuredCluster) -> None:
    with cluster.channel(cluster.grpc, NOBODY) as channel:
        assert GRPCInferenceServiceStub(channel).ServerLive(oip.ServerLiveRequest(), timeout=WAIT_S).live
