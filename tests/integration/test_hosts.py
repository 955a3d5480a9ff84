"""Roles on hosts of their own: network namespaces that reach each other over a bridge."""

from collections.abc import Iterator

import grpc
import pytest

from benchmarks.cluster import ClusterHosts
from benchmarks.waiting import eventually
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, write_factor

WAIT_S = 60.0
MANAGER, DOOR, FURTHER = 0, 1, 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHosts]:
    """A manager, a gateway with a worker, and a second worker, on three hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    write_factor(folder / "models", "factor", 2.0)
    with ClusterHosts(3, folder) as hosts:
        hosts.manager(MANAGER, folder / "models", "--health-host", hosts.address(MANAGER))
        join = hosts.address(MANAGER)
        hosts.gateway(DOOR, join)
        hosts.worker(DOOR, join)
        hosts.worker(FURTHER, join, "--health-host", hosts.address(FURTHER), "--insecure")
        hosts.wait_ready(DOOR)
        eventually(lambda: hosts.workers(DOOR) == {"h1.worker-0", "h2.worker-0"}, "both workers are there", WAIT_S)
        yield hosts


def infer(cluster: ClusterHosts, number: float = 3.0, timeout_s: float = WAIT_S) -> float:
    with grpc.insecure_channel(f"{cluster.address(DOOR)}:50051") as channel:
        (found,) = answered(GRPCInferenceServiceStub(channel).ModelInfer(floats("factor", number), timeout=timeout_s))
        return found


def test_a_request_is_answered_by_workers_of_both_hosts(cluster: ClusterHosts) -> None:
    assert [infer(cluster, float(number)) for number in range(8)] == [2.0 * number for number in range(8)]
