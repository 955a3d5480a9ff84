"""Routing through a real server: live changes of policies, keys, ejection and readmission, cache, priorities."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from tests.servers import floats_json, write_identity, write_slow

# Fails on negative numbers while its trouble file exists; returns the process that answered.
TROUBLED = """
import os
from pathlib import Path

import numpy as np


class Model:
    def infer(self, inputs, context):
        trouble = Path({trouble!r})
        if trouble.exists() and trouble.read_text() == context.parameters.get("victim", "-"):
            raise RuntimeError("in trouble")
        return {{"pid": np.array([os.getppid()], np.int64)}}
"""
PYTHON = """engine: python
health: {failures: 3, eject_s: 0.2}
python:
  inputs: [{name: x, datatype: FP32, shape: [1]}]
  outputs: [{name: pid, datatype: INT64, shape: [1]}]
"""
X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    write_identity(models, "echo", "FP32")
    write_identity(models, "kept", "FP32", "cache: {enabled: true}\n")
    write_slow(
        models,
        "levels",
        "batching: {max_rows: 1}\ninstances: {count: 1}\n"
        "priorities: {levels: 2, default: 2, by_level: {2: {timeout_ms: 300}}}\n",
    )
    write_python(models / "workers", models / "trouble")
    with ServerProcess(models, tmp_path_factory.mktemp("server"), "--workers", "2") as running:
        yield running


def write_python(folder: Path, trouble: Path) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "model.yaml").write_text(PYTHON)
    (folder / "1" / "model.py").write_text(TROUBLED.format(trouble=str(trouble)))


def infer(server: ServerProcess, model: str, body: dict[str, Any], **parameters: object) -> httpx.Response:
    message = {**body, "parameters": {**body.get("parameters", {}), **parameters}}
    return httpx.post(f"{server.http_url}/v2/models/{model}/infer", json=message, timeout=60)


def routing(server: ServerProcess, model: str, key: str = "") -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(
        f"{server.http_url}/v1/models/{model}/routing", params={"key": key} if key else {}, timeout=30
    ).json()
    return found


def route(server: ServerProcess, model: str, **settings: object) -> httpx.Response:
    return httpx.put(f"{server.http_url}/v1/models/{model}/routing", json=settings, timeout=30)


def pids(server: ServerProcess, count: int, **parameters: object) -> Counter[int]:
    answers = [infer(server, "workers", X, **parameters) for _ in range(count)]
    assert all(answer.status_code == 200 for answer in answers), answers[-1].text
    return Counter(answer.json()["outputs"][0]["data"][0] for answer in answers)


def test_a_policy_is_switched_while_requests_flow(server: ServerProcess) -> None:
    policies = ["round_robin", "random", "least_connections", "least_latency", "weighted", "hash", "locality"]
    with ThreadPoolExecutor(4) as pool:
        for policy in policies:
            answers = [pool.submit(infer, server, "echo", floats_json(float(i))) for i in range(40)]
            assert route(server, "echo", policy=policy).status_code == 200
            assert all(answer.result().status_code == 200 for answer in answers)
            eventually(lambda: routing(server, "echo")["routing"]["policy"] == policy, policy)  # noqa: B023
    assert routing(server, "echo")["is_override"]
    assert httpx.delete(f"{server.http_url}/v1/models/echo/routing", timeout=30).status_code == 200
    eventually(lambda: not routing(server, "echo")["is_override"], "the model's own routing")


def test_round_robin_shares_requests_evenly(server: ServerProcess) -> None:
    route(server, "workers", policy="round_robin")
    eventually(lambda: routing(server, "workers")["routing"]["policy"] == "round_robin", "round robin")
    assert sorted(pids(server, 10).values()) == [5, 5]


def test_requests_with_one_key_go_to_one_worker(server: ServerProcess) -> None:
    route(server, "workers", policy="hash", key="user", without_key="refuse")
    eventually(lambda: routing(server, "workers")["routing"]["policy"] == "hash", "hash")
    by_user = {user: pids(server, 4, user=user) for user in map(str, range(12))}
    assert all(len(found) == 1 for found in by_user.values())
    assert len({next(iter(found)) for found in by_user.values()}) == 2
    worker_pids = {worker["id"]: worker["pid"] for worker in server.status()["workers"]}
    for user, found in by_user.items():
        owner = routing(server, "workers", user)["blocks"][0]["owner"]
        assert worker_pids[owner] == next(iter(found))
    refused = infer(server, "workers", X)
    assert refused.status_code == 400
    assert "user" in refused.json()["error"]


def test_invalid_routing_is_refused(server: ServerProcess) -> None:
    assert route(server, "echo", policy="fastest").status_code == 400
    assert route(server, "nobody", policy="random").status_code == 404
    assert httpx.get(f"{server.http_url}/v1/models/nobody/routing", timeout=30).status_code == 404


def test_a_failing_worker_is_ejected_and_returns(server: ServerProcess, models: Path) -> None:
    route(server, "workers", policy="hash", key="user")
    eventually(lambda: routing(server, "workers")["routing"]["policy"] == "hash", "hash")
    owner = routing(server, "workers", "7")["blocks"][0]["owner"]
    trouble = models / "trouble"
    trouble.write_text("yes")
    failed = [infer(server, "workers", X, user="7", victim="yes").status_code for _ in range(3)]
    assert failed == [500, 500, 500]

    def state() -> dict[str, Any]:
        workers = routing(server, "workers")["blocks"][0]["workers"]
        return next(worker for worker in workers if worker["name"] == owner)

    ejected = server.metric("penstock_ejections", event="ejected")
    assert ejected >= 1
    # Requests with the key go to another worker meanwhile, and return after a successful probe.
    assert infer(server, "workers", X, user="7").status_code == 200
    trouble.unlink()
    eventually(lambda: state()["state"] == "healthy", "a probe brought it back")
    assert server.metric("penstock_ejections", event="restored") >= 1
    assert routing(server, "workers", "7")["blocks"][0]["owner"] == owner


def test_a_cached_answer_is_marked_and_can_be_bypassed(server: ServerProcess) -> None:
    body = floats_json(3.0, 4.0)
    first, second = infer(server, "kept", body), infer(server, "kept", body)
    assert "cache" not in first.json().get("parameters", {})
    assert second.json()["parameters"]["cache"] == "hit"
    assert first.json()["outputs"] == second.json()["outputs"]
    assert "hit" not in str(infer(server, "kept", body, cache="bypass").json().get("parameters", {}).get("cache"))
    eventually(lambda: server.metric("penstock_cache_requests", model="kept", outcome="hit") == 1, "one hit")
    assert httpx.get(f"{server.http_url}/v1/cache", timeout=30).json()["entries"] == 1
    assert httpx.delete(f"{server.http_url}/v1/cache", params={"model": "kept"}, timeout=30).status_code == 200
    assert "cache" not in infer(server, "kept", body).json().get("parameters", {})


def test_a_higher_priority_overtakes_and_a_lower_one_times_out(server: ServerProcess) -> None:
    """Both workers are busy for long; one request of each level waits, and the lower one's queue timeout passes."""
    slow = floats_json(3000.0)
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(infer, server, "levels", slow, priority=1) for _ in range(6)]
        eventually(lambda: sum(sum(queue.values()) for queue in server.status()["queues"].values()) >= 6, "all wait")
        low = pool.submit(infer, server, "levels", floats_json(1.0))
        high = pool.submit(infer, server, "levels", floats_json(1.0), priority=1)
        assert low.result().status_code == 503
        assert low.result().headers["penstock-code"] == "queue_timeout"
        assert high.result().status_code == 200
        assert all(answer.result().status_code == 200 for answer in busy)
