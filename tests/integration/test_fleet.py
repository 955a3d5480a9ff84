"""A fleet on a Ray cluster of three nodes: roles start, survive the loss of a node, and are scaled."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError

import grpc
import pytest

from benchmarks.ray_cluster import RayCluster
from benchmarks.waiting import eventually
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, write_factor

WAIT_S = 90.0
NEEDS = ("--resource", "spot=1", "--gateway-resource", "public=1", "--cpus", "0.5")
LISTENS = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("fleet")
    write_factor(folder / "models", "factor", 2.0)
    with RayCluster([{"public": 1}, {"spot": 3}, {"spot": 3}], folder / "models", folder) as cluster:
        cluster.fleet("up", "--join", cluster.manager, "--workers", "2", *NEEDS, *LISTENS)
        yield cluster


def workers(http: str) -> dict[str, int]:
    """Return the process id of each worker that the gateway knows."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/v1/status", timeout=WAIT_S) as answer:
            status: dict[str, Any] = json.load(answer)
    except URLError:
        return {}  # the gateway is not open yet
    return {worker["id"]: worker["pid"] for worker in status["workers"] if worker["blocks"]}


def test_a_fleet_serves_and_a_lost_node_costs_no_request(cluster: RayCluster) -> None:
    roles = cluster.running()
    assert roles.keys() == {"gateway-0", "worker-0", "worker-1"}
    gateway = roles["gateway-0"]["places"]
    assert roles["worker-0"]["places"]["node"] != gateway["node"], (
        "the worker needs a resource that the node of the gateway lacks"
    )
    eventually(lambda: len(workers(gateway["http"])) == 2, "both workers serve", WAIT_S)
    before = workers(gateway["http"])
    with grpc.insecure_channel(f"127.0.0.1:{gateway['grpc']}") as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer

        def is_back() -> bool:
            assert answered(call(floats("factor", 3.0), timeout=WAIT_S)) == [6.0]
            there = workers(gateway["http"])
            return there.keys() == before.keys() and there["ray.worker-0"] != before["ray.worker-0"]

        cluster.kill_node(roles["worker-0"]["places"]["node"])
        eventually(is_back, "the worker is back on another node", WAIT_S)
    roles = cluster.fleet("scale", "--workers", "3", "--gateways", "0")
    assert roles.keys() == {"worker-0", "worker-1", "worker-2"}
    assert cluster.fleet("scale", "--workers", "1", "--drain-s", "1").keys() == {"worker-0"}
    assert cluster.fleet("down") == {}
    with pytest.raises(RuntimeError, match="fleet up"):
        cluster.fleet("scale", "--workers", "1")
