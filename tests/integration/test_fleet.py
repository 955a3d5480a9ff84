"""A fleet on a Ray cluster of three nodes: roles start, survive the loss of a node, and are scaled.

The commands are those of docs/cluster.md, with fewer and smaller roles.
"""

import json
import shlex
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError

import grpc
import pytest

from benchmarks.ray_cluster import RayCluster
from benchmarks.waiting import eventually
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.integration.test_documented_commands import ALL, CLUSTER
from tests.servers import answered, floats, write_factor

WAIT_S = 90.0
NEEDS = ("--gateway-resource", "public=1", "--cpus", "0.5")
ROLES = ("--workers", "2", "--gateways", "1")
LISTENS = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("fleet")
    write_factor(folder / "models", "factor", 2.0)
    nodes = [{"public": 1}, {"spot": 3, "GPU": 3}, {"spot": 3, "GPU": 3}]
    with RayCluster(nodes, folder / "models", folder) as cluster:
        cluster.fleet(*documented("up", cluster), *ROLES, *NEEDS, *LISTENS)
        yield cluster


def documented(command: str, cluster: RayCluster) -> list[str]:
    """Return the words of the page's command after `penstock fleet`, with the addresses of this cluster."""
    (found,) = (text for text in ALL[CLUSTER] if text.startswith(f"penstock fleet {command} "))
    assert "--address 10.0.0.1:6379" in found
    places = {"10.0.0.1:6379": cluster.address, "10.0.0.1": cluster.manager}
    return [places.get(word, word) for word in shlex.split(found)[2:]]


def workers(http: str) -> dict[str, int]:
    """Return the process id of each worker that the gateway knows."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/v1/status", timeout=WAIT_S) as answer:
            status: dict[str, Any] = json.load(answer)
    except URLError:
        return {}  # the gateway is not open yet
    return {worker["id"]: worker["pid"] for worker in status["workers"] if worker["blocks"]}


@pytest.mark.timeout(400)
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
    assert cluster.fleet(*documented("status", cluster)).keys() == roles.keys()
    roles = cluster.fleet(*documented("scale", cluster), "--workers", "3", "--gateways", "0")
    assert roles.keys() == {"worker-0", "worker-1", "worker-2"}
    assert cluster.fleet("scale", "--workers", "1", "--drain-s", "1").keys() == {"worker-0"}
    assert cluster.fleet(*documented("down", cluster)) == {}
    with pytest.raises(RuntimeError, match="fleet up"):
        cluster.fleet("scale", "--workers", "1")
