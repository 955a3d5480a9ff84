"""Roles on several hosts: network namespaces connected by a bridge."""

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.cluster import ClusterHosts
from benchmarks.waiting import eventually
from penstock.client.registry import RegistryClient
from penstock.core.errors import Conflict
from penstock.features.registry.scan import scan
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from penstock.pb.v1 import cluster_pb2
from penstock.pb.v1.access_pb2 import DiscoverRequest
from penstock.pb.v1.access_pb2_grpc import DirectStub
from penstock.pb.v1.cluster_pb2_grpc import ClusterStub
from tests.servers import answered, floats, floats_json, write_factor

WAIT_S = 60.0
MANAGER, GATEWAY, FURTHER = 0, 1, 2
BOTH = {"h1.worker-0", "h2.worker-0"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_factor(repository, "factor", 2.0)
    return repository


@pytest.fixture(scope="module")
def cluster(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHosts]:
    """Start a manager, a gateway with a worker, and a second worker, on three hosts."""
    with ClusterHosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        hosts.manager(MANAGER, models, "--health-host", hosts.address(MANAGER))
        join = hosts.address(MANAGER)
        hosts.gateway(GATEWAY, join)
        hosts.worker(GATEWAY, join)
        further = hosts.address(FURTHER)
        hosts.worker(FURTHER, join, "--host", further, "--health-host", further, "--insecure")
        hosts.wait_ready(GATEWAY)
        until_workers(hosts, BOTH)
        yield hosts


def until_workers(cluster: ClusterHosts, workers: set[str]) -> None:
    eventually(lambda: cluster.workers(GATEWAY) == workers, f"the gateway has {workers}", WAIT_S)


def infer(cluster: ClusterHosts, number: float = 3.0, timeout_s: float = WAIT_S, model: str = "factor") -> float:
    with grpc.insecure_channel(f"{cluster.address(GATEWAY)}:50051") as channel:
        (found,) = answered(GRPCInferenceServiceStub(channel).ModelInfer(floats(model, number), timeout=timeout_s))
        return found


@contextmanager
def asking(cluster: ClusterHosts) -> Iterator[None]:
    """Run callers that send requests and get answers all the time."""
    is_over = Event()

    def ask() -> None:
        with grpc.insecure_channel(f"{cluster.address(GATEWAY)}:50051") as channel:
            stub = GRPCInferenceServiceStub(channel)
            while not is_over.wait(0.01):
                assert answered(stub.ModelInfer(floats("factor", 3.0), timeout=WAIT_S)) == [6.0]

    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(ask) for _ in range(4)]
        try:
            yield
        finally:
            is_over.set()
        for caller in callers:
            caller.result(WAIT_S)


def load(cluster: ClusterHosts) -> str:
    """Reload the model and return the error, or an empty text."""
    return cluster.post(GATEWAY, "/v2/repository/models/factor/load", timeout_s=WAIT_S)


def test_both_hosts_workers_answer_requests(cluster: ClusterHosts) -> None:
    assert [infer(cluster, float(number)) for number in range(8)] == [2.0 * number for number in range(8)]
    assert load(cluster) == ""


def test_a_client_connects_directly_to_a_worker_with_an_open_endpoint(cluster: ClusterHosts) -> None:
    """The other worker's endpoint is open to its own host only."""
    with grpc.insecure_channel(f"{cluster.address(GATEWAY)}:50051") as channel:
        way = DirectStub(channel).Discover(DiscoverRequest(model="factor"), timeout=WAIT_S)
    assert way.worker_id == "h2.worker-0"
    assert way.address.startswith(f"{cluster.address(FURTHER)}:")
    with grpc.insecure_channel(way.address) as channel:
        assert answered(GRPCInferenceServiceStub(channel).ModelInfer(floats(way.block_id, 3.0), timeout=WAIT_S)) == [
            6.0
        ]


async def test_an_uploaded_model_is_fetched_verified_and_served(cluster: ClusterHosts, tmp_path: Path) -> None:
    write_factor(tmp_path, "triple", 3.0)
    scanned = scan(tmp_path / "triple", "")
    address = f"{cluster.address(MANAGER)}:7400"
    async with RegistryClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        made = await client.push(scanned.manifest, scanned.files)
        spec = cluster_pb2.BlockSpec(model="triple", source="registry")
        request = cluster_pb2.DeployBlockRequest(spec=spec, wait_s=WAIT_S)
        deployed = await ClusterStub(channel).DeployBlock(request, timeout=WAIT_S)
        assert not deployed.HasField("failure"), deployed.failure.message
        assert await asyncio.to_thread(infer, cluster, 5.0, model="triple") == 15.0
        assert (await client.find("triple")).blocks == tuple(deployed.block_ids)
        with pytest.raises(Conflict, match=deployed.block_ids[0]):
            await client.delete("triple", "1")
    url = f"http://{cluster.address(MANAGER)}:7412/v1/registry/models/triple/versions/latest"
    with await asyncio.to_thread(urlopen, url, timeout=WAIT_S) as answer:
        assert json.load(answer)["digest"] == made.digest


def test_every_role_reports_its_health(cluster: ClusterHosts) -> None:
    for host, port in ((MANAGER, 7410), (GATEWAY, 8080), (FURTHER, 7420)):
        assert cluster.http(host, "/healthz", port) == (200, b'{"status":"alive"}')
        eventually(lambda h=host, p=port: cluster.http(h, "/readyz", p) == (200, b'{"status":"ready"}'), f"host {host}")  # type: ignore[misc]
        status, text = cluster.http(host, "/metrics", port)
        assert status == 200
        assert b"penstock_" in text or host == MANAGER
    for host, port in ((MANAGER, 7411), (MANAGER, 7400), (GATEWAY, 50051), (FURTHER, 7421)):
        with grpc.insecure_channel(f"{cluster.address(host)}:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            eventually(lambda c=check: c(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1, f"host {host}")  # type: ignore[misc]


def test_a_second_host_with_the_same_name_is_refused(cluster: ClusterHosts) -> None:
    worker = cluster.role(MANAGER, "worker", "--join", cluster.address(MANAGER), name="second", node="h2")
    gateway = cluster.role(
        FURTHER,
        "gateway",
        *("--join", cluster.address(MANAGER), "--host", cluster.address(FURTHER), "--insecure"),
        name="second-gateway",
        node="h1",
    )
    join = ("--join", cluster.address(MANAGER), "--gateways", "0")
    machine = cluster.role(MANAGER, "serve", *join, name="second-machine", node="h2")
    for second, name in ((worker, "h2.worker-0"), (gateway, "h1.gateway-0"), (machine, "h2.worker-0")):
        assert second.end() == 2
        said = second.log.read_text()
        assert f"another role of the cluster is already named '{name}'" in said
        assert "--node" in said
        assert "Traceback" not in said
    assert cluster.workers(GATEWAY) == BOTH
    assert infer(cluster) == 6.0


@pytest.mark.parametrize("role", ["manager", "gateway", "serve"])
def test_addresses_beyond_loopback_need_keys_or_insecure(cluster: ClusterHosts, models: Path, role: str) -> None:
    flags = ("--models", str(models)) if role == "manager" else ("--join", cluster.address(MANAGER))
    refused = cluster.role(FURTHER, role, *flags, "--bind", "0.0.0.0:0", name=f"open-{role}")
    assert refused.end() == 2
    assert "is open to other machines" in refused.log.read_text()
    assert "--insecure" in refused.log.read_text()


def test_a_machine_joins_and_leaves_while_requests_flow(cluster: ClusterHosts) -> None:
    here = cluster.address(MANAGER)
    join = ("--join", here, "--host", here, "--insecure")
    with asking(cluster):
        machine = cluster.role(MANAGER, "serve", *join, "--workers", "2", "--health-host", here, name="machine")
        until_workers(cluster, BOTH | {"h0.worker-0", "h0.worker-1"})
        cluster.wait_ready(MANAGER)  # its own gateway knows all workers
        assert cluster.workers(MANAGER) == cluster.workers(GATEWAY)
        ready = (200, b'{"status":"ready"}')
        eventually(lambda: cluster.http(MANAGER, "/readyz", 7430) == ready, "the machine is ready", WAIT_S)
        assert b'worker="h0.worker-1"' in cluster.http(MANAGER, "/metrics", 7430)[1]
        assert machine.stop() == 0
        until_workers(cluster, BOTH)


def test_a_killed_or_disconnected_worker_is_excluded_and_returns(cluster: ClusterHosts) -> None:
    with asking(cluster):
        cluster.cut_off(FURTHER)
        until_workers(cluster, {"h1.worker-0"})
        cluster.heal(FURTHER)
        until_workers(cluster, BOTH)
        cluster.roles["h2.worker"].kill()
        until_workers(cluster, {"h1.worker-0"})
        cluster.worker(FURTHER, cluster.address(MANAGER))
        until_workers(cluster, BOTH)


def test_a_gateway_that_is_cut_off_from_the_managers_keeps_its_workers(cluster: ClusterHosts) -> None:
    worker = cluster.roles["h2.worker"]
    before = len(worker.lines("gateway_unlisted"))
    with asking(cluster):
        cluster.separate(MANAGER, GATEWAY)
        eventually(lambda: len(worker.lines("gateway_unlisted")) > before, "the managers drop the gateway", WAIT_S)
        assert infer(cluster) == 6.0
        assert cluster.workers(GATEWAY) == BOTH
        cluster.unite(MANAGER, GATEWAY)
    eventually(lambda: load(cluster) == "", "the gateway has found its manager", WAIT_S)


def test_a_request_that_no_worker_can_answer_is_refused_with_a_retry_hint(cluster: ClusterHosts) -> None:
    cluster.roles["h1.worker"].kill()
    until_workers(cluster, {"h2.worker-0"})
    cluster.separate(GATEWAY, FURTHER)
    until_workers(cluster, set())
    request = Request(
        f"http://{cluster.address(GATEWAY)}:8080/v2/models/factor/infer", json.dumps(floats_json(1)).encode()
    )
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=WAIT_S).close()
    assert refused.value.code == 503
    assert refused.value.headers["retry-after"]
    assert "no worker" in refused.value.read().decode()
    cluster.unite(GATEWAY, FURTHER)
    cluster.worker(GATEWAY, cluster.address(MANAGER))
    until_workers(cluster, BOTH)
    assert infer(cluster) == 6.0


def test_without_the_manager_requests_continue_and_dead_workers_are_excluded(
    cluster: ClusterHosts, models: Path
) -> None:
    pids = {worker["id"]: worker["pid"] for worker in cluster.status(GATEWAY)["workers"]}
    with asking(cluster):
        cluster.roles["h0.manager"].kill()
        cluster.roles["h2.worker"].signal(signal.SIGKILL)
        until_workers(cluster, {"h1.worker-0"})
        assert "manager" in json.loads(load(cluster))["error"]
        cluster.worker(FURTHER, cluster.address(MANAGER))
        cluster.manager(MANAGER, models)
        until_workers(cluster, BOTH)
    found = {worker["id"]: worker["pid"] for worker in cluster.status(GATEWAY)["workers"]}
    assert found["h1.worker-0"] == pids["h1.worker-0"], "the worker's process is the same"
    eventually(lambda: load(cluster) == "", "the gateway has found its manager", WAIT_S)


def test_a_machine_that_serves_lets_another_join(models: Path, tmp_path: Path) -> None:
    """The advertised addresses differ from the bound ones."""
    with ClusterHosts(2, tmp_path) as hosts:
        here, there = hosts.address(0), hosts.address(1)
        flags = ("--bind", "0.0.0.0", "--advertise", here, "--host", here, "--insecure")
        hosts.role(0, "serve", "--models", str(models), *flags)
        hosts.role(1, "serve", "--join", here, "--bind", "0.0.0.0", "--host", there, "--insecure")
        workers = {"h0.worker-0", "h1.worker-0"}
        eventually(lambda: hosts.workers(0) == hosts.workers(1) == workers, "both gateways have both workers", WAIT_S)
        hosts.wait_ready(1)
        assert hosts.http(0, "/readyz")[0] == 200


def test_a_gateway_that_starts_without_managers_serves_from_its_last_state(cluster: ClusterHosts, models: Path) -> None:
    cluster.roles["h0.manager"].kill()
    cluster.roles["h1.gateway"].kill()
    again = cluster.gateway(GATEWAY, cluster.address(MANAGER))
    cluster.wait_ready(GATEWAY)
    assert infer(cluster) == 6.0
    assert [line["level"] for line in again.lines("kept_state_used")] == ["warning"]
    cluster.manager(MANAGER, models)
    eventually(lambda: load(cluster) == "", "the gateway has found its manager", WAIT_S)
    until_workers(cluster, BOTH)
