"""A cluster whose roles and callers know each other by certificates: a manager, a gateway and a worker."""

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
from penstock.experiments.processes import Running
from penstock.pb.inference import grpc_service_pb2 as oip
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import cluster_pb2
from penstock.pb.v1 import job_pb2 as pb
from penstock.pb.v1.cluster_pb2_grpc import ClusterStub
from penstock.wire import frames
from penstock.wire.endpoints import split_key
from penstock.wire.sockets import DealerSocket
from tests.servers import answered, floats, floats_json, log_lines, write_factor, write_identity
from tests.tls import TestAuthority

WAIT_S = 60.0
ROLES = {"manager-1": ["join"], "gateway-1": ["join"], "worker-*": ["join"]}
CALLERS = {"alice@example.com": ["inference"], "ops@example.com": ["admin"]}
NOBODY = "mallory@example.com"  # whose certificate is good, and stands for nobody
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
        told = self._start("manager", "managing", "--models", str(models), "--bind", "127.0.0.1:0")
        self.manager = told["address"]
        self.registry = log_line(folder / "manager.log", "registry_door")["http"]
        self.health = log_line(folder / "manager.log", "health_door")
        self._start("worker", "", "--join", self.manager)
        ports = ("--http-port", "0", "--grpc-port", "0", "--bind", "127.0.0.1:0")
        door = self._start("gateway", "serving", "--join", self.manager, *ports)
        self.http, self.grpc, self.workers_door = door["http"], door["grpc"], door["workers_door"]
        eventually(lambda: self.is_ready(), "the gateway is ready", WAIT_S)

    def _start(self, role: str, event: str, *flags: str) -> dict[str, Any]:
        settings = self.authority.settings(f"{role}-1", client_auth="required", principals=ROLES | CALLERS)
        config, log = self._folder / f"{role}.yaml", self._folder / f"{role}.log"
        config.write_text(yaml.safe_dump(settings | {"registry": {"http_port": 0}}))
        command = [sys.executable, "-m", "penstock", role, "--node", "here", "--config", str(config), *flags]
        command += ["--data-dir", str(self._folder / role)]
        if role != "gateway":
            command += ["--health-port", "0", "--health-grpc-port", "0"]
        self._stack.enter_context(Running(command, log))
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

    eventually(lambda: bool(found()), f"{log} tells '{event}'", WAIT_S)
    return found()[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("secured")
    with ExitStack() as stack:
        yield SecuredCluster(folder, TestAuthority(folder / "certs"), stack)


def asked(cluster: SecuredCluster, name: str) -> Any:
    """How a gateway answers this caller, over gRPC."""
    with cluster.channel(cluster.grpc, name) as channel:
        try:
            response = GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", 3.0), timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code()
        assert answered(response) == [6.0]
        return Code.OK


def managed(cluster: SecuredCluster, name: str) -> Any:
    """And a manager, whom it asks for something that operators do."""
    with cluster.channel(cluster.manager, name) as channel:
        try:
            request = cluster_pb2.DrainWorkerRequest(worker_id="here.worker-0", is_draining=False)
            ClusterStub(channel).DrainWorker(request, timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code()
        return Code.OK


def test_a_certificate_is_as_good_as_a_key(cluster: SecuredCluster) -> None:
    assert asked(cluster, "alice@example.com") is Code.OK
    assert asked(cluster, "ops@example.com") is Code.OK
    assert asked(cluster, "worker-1") is Code.PERMISSION_DENIED
    assert asked(cluster, NOBODY) is Code.UNAUTHENTICATED
    assert managed(cluster, "ops@example.com") is Code.OK
    assert managed(cluster, "alice@example.com") is Code.PERMISSION_DENIED
    assert managed(cluster, NOBODY) is Code.UNAUTHENTICATED


def test_over_http_too(cluster: SecuredCluster) -> None:
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


async def test_over_websockets_too(cluster: SecuredCluster) -> None:
    url = cluster.http.replace("https", "wss") + "/v2/models/bytes/stream?input=x&output=y"
    async with asyncio.timeout(WAIT_S):
        async with connect(url, ssl=cluster.authority.context("alice@example.com"), compression=None) as opened:
            await opened.send(b"a frame")
            assert await opened.recv()
        for name, status in (("worker-1", 403), (NOBODY, 401)):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, ssl=cluster.authority.context(name), compression=None)
            assert refused.value.response.status_code == status


def test_whoever_shows_none_or_one_of_another_authority_does_not_come_in(cluster: SecuredCluster) -> None:
    assert asked(cluster, "") is Code.UNAVAILABLE
    assert managed(cluster, "") is Code.UNAVAILABLE
    wrong = cluster.authority.context()
    stranger = cluster.stranger.files("alice@example.com")
    wrong.load_cert_chain(stranger.cert, stranger.key)
    for context in (cluster.authority.context(), wrong):
        for url in (cluster.http, cluster.registry):
            with pytest.raises(httpx.HTTPError), httpx.Client(verify=context, timeout=WAIT_S) as client:
                client.get(f"{url}/v2/health/live")


def test_a_manager_s_doors_over_http_know_callers_too(cluster: SecuredCluster) -> None:
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


async def test_a_stranger_s_hello_at_the_workers_door_is_not_answered(cluster: SecuredCluster) -> None:
    """With the gateway's public key, which is no secret, or without any."""
    heard: list[object] = []
    where, key = split_key(cluster.workers_door)
    assert len(key) == 64
    hello = pb.Frame(hello=pb.Hello(protocol=frames.PROTOCOL, worker_id="mallory"))
    strangers = []
    for endpoint in (where, cluster.workers_door):
        stranger = DealerSocket(heard.append, b"mallory")
        stranger.connect(endpoint)
        stranger.send(frames.encode(hello))
        strangers.append(stranger)
    await asyncio.sleep(1.0)
    for stranger in strangers:
        stranger.close()
    assert heard == []
    with cluster.client("ops@example.com") as client:
        assert {each["id"] for each in client.get("/v1/status").json()["workers"]} == {"here.worker-0"}


def test_a_manager_s_http_doors_know_the_owners_of_certificates(cluster: SecuredCluster) -> None:
    found = {}
    for name in ("ops@example.com", "alice@example.com", NOBODY):
        with httpx.Client(verify=cluster.authority.context(name), timeout=WAIT_S) as client:
            paths = (f"{cluster.registry}/v1/registry/models", f"{cluster.health['http']}/metrics")
            found[name] = [client.get(path).status_code for path in paths]
    assert found == {"ops@example.com": [200, 200], "alice@example.com": [403, 403], NOBODY: [401, 401]}


def test_commands_show_their_certificate(cluster: SecuredCluster, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from penstock.cli.main import app

    config = tmp_path / "ops.yaml"
    config.write_text(yaml.safe_dump(cluster.authority.settings("ops@example.com")))
    flags = ["--manager", cluster.manager, "--config", str(config), "--json"]
    result = CliRunner().invoke(app, ["cluster", "status", *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["is_leader"]


def test_a_gateway_s_methods_for_all_are_for_all(cluster: SecuredCluster) -> None:
    with cluster.channel(cluster.grpc, NOBODY) as channel:
        assert GRPCInferenceServiceStub(channel).ServerLive(oip.ServerLiveRequest(), timeout=WAIT_S).live
