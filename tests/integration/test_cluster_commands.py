"""Commands on a real cluster: blocks move as requested, and no request fails."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.cluster import ClusterHosts
from benchmarks.waiting import eventually
from penstock.cli import main as cli
from penstock.core.errors import ModelNotReady, UnknownModel
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, write_factor

WAIT_S = 60.0
PAUSE_S = 0.02
MANAGER, GATEWAY, FURTHER = 0, 1, 2
WORKERS = ["h1.worker-0", "h2.worker-0"]


class Asked(ClusterHosts):
    """A cluster with the commands of an operator, and requests of a client."""

    def ask(self, *arguments: str) -> Any:
        manager = ("--server", self.address(MANAGER), "--json")
        found = CliRunner().invoke(cli.app, [*arguments, *manager])
        if found.exception is not None:
            raise found.exception
        return json.loads(found.stdout)

    def block(self, model: str) -> dict[str, Any]:
        (found,) = self.ask("block", "list", "--model", model)
        return dict(found)

    def holders(self, model: str) -> list[str]:
        return [holder["worker_id"] for holder in self.block(model)["holders"]]

    def infer(self, model: str, number: float = 3.0) -> float:
        with grpc.insecure_channel(f"{self.address(GATEWAY)}:50051") as channel:
            (found,) = answered(GRPCInferenceServiceStub(channel).ModelInfer(floats(model, number), timeout=WAIT_S))
            return found

    @contextmanager
    def traffic(self, model: str) -> Iterator[None]:
        """Send a request every few milliseconds, none of which may fail."""
        is_over, failures = threading.Event(), list[Exception]()

        def run() -> None:
            while not is_over.wait(PAUSE_S):
                try:
                    assert self.infer(model) == 6.0
                except (AssertionError, grpc.RpcError) as error:
                    failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        assert failures == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Start a manager, a gateway with a worker, and a second worker, on three hosts."""
    folder = tmp_path_factory.mktemp("commands")
    write_factor(folder / "models", "factor", 2.0)
    write_factor(folder / "models", "sleeper", 2.0, "residence: {load: lazy, idle_unload_s: 2}\n")
    labels = _config(folder / "gold.yaml", {"worker": {"labels": {"tier": "gold"}}})
    with Asked(3, folder) as hosts:
        hosts.manager(MANAGER, folder / "models", "--health-host", hosts.address(MANAGER))
        hosts.gateway(GATEWAY, hosts.address(MANAGER))
        hosts.worker(GATEWAY, hosts.address(MANAGER))
        hosts.worker(FURTHER, hosts.address(MANAGER), "--config", labels)
        hosts.wait_ready(GATEWAY)
        eventually(lambda: sorted(hosts.holders("factor")) == WORKERS, "both workers hold it", WAIT_S)
        yield hosts


def _config(file: Path, settings: dict[str, Any]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))
    return str(file)


def test_the_cluster_and_its_workers_are_shown(cluster: Asked) -> None:
    status = cluster.ask("cluster", "status")
    assert status["is_leader"]
    assert status["workers"] == {"alive": 2}
    assert [gateway["gateway_id"] for gateway in status["gateways"]] == ["h1.gateway-0"]
    first, second = cluster.ask("worker", "list")
    assert [first["worker_id"], second["worker_id"]] == WORKERS
    assert (first["facts"]["node"], second["facts"]["labels"]) == ("h1", {"tier": "gold"})
    assert first["load"]["memory_bytes"] > 0


def test_a_scaled_block_explains_its_placement(cluster: Asked) -> None:
    with cluster.traffic("factor"):
        cluster.ask("block", "scale", "factor", "1")
        eventually(lambda: len(cluster.holders("factor")) == 1, "one worker holds it", WAIT_S)
        (holder,) = cluster.holders("factor")
        (other,) = set(WORKERS) - {holder}
        sentences = cluster.ask("block", "explain", "factor")["sentences"]
        assert sentences[0].endswith("wants one replica: 1 placed.")
        assert any(sentence.startswith(f"{holder} holds it: ") for sentence in sentences)
        assert any(sentence.startswith(f"Not on {other}: ") for sentence in sentences)


def test_administration_works_through_managers_and_gateways(cluster: Asked) -> None:
    for endpoint in (f"http://{cluster.address(MANAGER)}:7412", f"http://{cluster.address(GATEWAY)}:8080"):
        with httpx.Client(base_url=f"{endpoint}/v1/admin", timeout=WAIT_S) as client:
            assert [worker["worker_id"] for worker in client.get("/workers").json()["items"]] == WORKERS
            tag = client.get("/workers/h1.worker-0").headers["etag"]
            labels, shown = {"labels": {"asked-at": endpoint}}, {"if-match": tag}
            changed = client.patch("/workers/h1.worker-0", json=labels, headers=shown)
            assert changed.json()["facts"]["labels"] == {"asked-at": endpoint}
            assert client.patch("/workers/h1.worker-0", json=labels, headers=shown).status_code == 412
            (gateway,) = client.get("/sessions").json()["items"]
            assert (gateway["gateway_id"], gateway["counts"]["open"]) == ("h1.gateway-0", 0)
    newest = cluster.ask("audit")[-1]
    assert (newest["who"], newest["what"]) == ("anybody", "Cluster.ChangeWorker")
    assert json.loads(newest["changes"][0]["after"])["labels"] == {"asked-at": endpoint}


def test_draining_a_worker_first_moves_its_blocks_and_removing_forgets_it(cluster: Asked) -> None:
    cluster.ask("block", "scale", "factor", "1")
    eventually(lambda: len(cluster.holders("factor")) == 1, "one worker holds it", WAIT_S)
    (holder,) = cluster.holders("factor")
    (other,) = set(WORKERS) - {holder}
    with cluster.traffic("factor"):
        assert cluster.ask("worker", "drain", holder)["is_empty"]
        assert cluster.holders("factor") == [other]
        drained = next(each for each in cluster.ask("worker", "list") if each["worker_id"] == holder)
        assert drained["is_draining"]
        assert not drained["blocks"]
        cluster.ask("worker", "drain", holder, "--undo")
        cluster.ask("block", "scale", "factor", "0")
        eventually(lambda: sorted(cluster.holders("factor")) == WORKERS, "both workers hold it again", WAIT_S)


def test_an_idle_block_is_loaded_on_demand_and_unloaded_again(cluster: Asked) -> None:
    cluster.ask("block", "deploy", "sleeper", "--replicas", "1", "--label", "tier=gold", "--wait", "60")
    eventually(lambda: cluster.holders("sleeper") == ["h2.worker-0"], "only one that has the label holds it", WAIT_S)
    eventually(lambda: cluster.block("sleeper")["state"] == "dormant", "it sleeps", WAIT_S)
    assert cluster.infer("sleeper") == 6.0
    (holder,) = cluster.block("sleeper")["holders"]
    assert (holder["worker_id"], holder["is_serving"]) == ("h2.worker-0", True)
    eventually(lambda: cluster.block("sleeper")["state"] == "dormant", "it sleeps again", WAIT_S)
    assert cluster.holders("sleeper") == ["h2.worker-0"]


def test_a_block_without_a_suitable_worker_shows_the_reason(cluster: Asked) -> None:
    with pytest.raises(ModelNotReady, match="penstock block explain sleeper"):
        cluster.ask("block", "deploy", "sleeper", "--replicas", "1", "--label", "tier=silver", "--wait", "1")
    sentences = cluster.ask("block", "explain", "sleeper")["sentences"]
    assert any("the block needs tier=silver, and the worker has tier=gold" in sentence for sentence in sentences)
    cluster.ask("block", "remove", "sleeper")
    with pytest.raises(UnknownModel):
        cluster.ask("block", "explain", "nothing")


def test_the_managers_endpoint_shows_the_whole_cluster(cluster: Asked) -> None:
    cluster.infer("factor")

    def text() -> str:
        return cluster.http(MANAGER, "/metrics", 7410)[1].decode()

    for counts in ("penstock_cluster_requests_total", "penstock_cluster_worker_requests_total"):
        eventually(lambda counts=counts: f'{counts}{{block="blk' in text(), f"{counts} came", WAIT_S)  # type: ignore[misc]
    for expected in (
        "penstock_cluster_leader 1.0",
        'penstock_cluster_workers{state="alive"} 2.0',
        'worker="h2.worker-0"',
    ):
        assert expected in text()


def test_events_are_listed(cluster: Asked) -> None:
    def kinds() -> set[str]:
        return {event["kind"] for event in cluster.ask("events", "--limit", "1000")}

    eventually(
        lambda: {"worker_alive", "worker_drained", "block_scaled", "block_deployed"} <= kinds(), "events", WAIT_S
    )


def test_a_drained_worker_stops_on_request(cluster: Asked) -> None:
    """Must run last: one worker is left."""
    assert cluster.ask("worker", "drain", "h2.worker-0", "--leave")["has_left"]
    eventually(lambda: not cluster.roles["h2.worker"].is_running(), "its process ended", WAIT_S)
    assert cluster.infer("factor") == 6.0
