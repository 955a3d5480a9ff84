"""The response cache of a real server: over every protocol, over restarts, and with a Redis that dies."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from benchmarks.server import ServerProcess
from benchmarks.valkey import Valkey
from benchmarks.waiting import eventually
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, floats_json, log_lines, write_identity, write_slow

WAIT_S = 90.0
CACHED = "cache: {enabled: true}\n"


def write_models(repository: Path) -> Path:
    for name in ("cached", "spoken", "cleared"):
        write_identity(repository, name, "FP32", CACHED)
    write_identity(repository, "plain", "FP32")
    write_slow(repository, "slow", CACHED + "timeouts: {request_s: 600}\n")
    return repository


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cache")
    with ServerProcess(write_models(folder / "models"), folder) as running:
        yield running


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_identity(tmp_path / "models", "cached", "FP32", CACHED)
    return tmp_path / "models"


def infer(server: ServerProcess, *numbers: float, model: str = "cached", **parameters: object) -> dict[str, Any]:
    body = {**floats_json(*numbers), "parameters": parameters}
    answer = httpx.post(f"{server.http_url}/v2/models/{model}/infer", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["outputs"][0]["data"] == list(numbers)
    return found


def is_hit(answer: dict[str, Any]) -> bool:
    return bool(answer.get("parameters", {}).get("cache") == "hit")


def batches(server: ServerProcess, model: str = "cached") -> float:
    return server.metric("penstock_batch_rows_count", model=model)


def test_the_cache_parameter_controls_the_cache(server: ServerProcess) -> None:
    assert not is_hit(infer(server, 1.0))
    assert is_hit(infer(server, 1.0))
    assert not is_hit(infer(server, 2.0))
    assert not is_hit(infer(server, 1.0, cache="bypass"))
    assert not is_hit(infer(server, 1.0, cache="refresh"))
    assert is_hit(infer(server, 1.0, cache="use", priority=1))
    assert not is_hit(infer(server, 1.0, temperature=0.5))
    assert [is_hit(infer(server, 1.0, model="plain")) for _ in range(2)] == [False, False]
    wrong = {**floats_json(1.0), "parameters": {"cache": "never"}}
    answer = httpx.post(f"{server.http_url}/v2/models/cached/infer", json=wrong, timeout=WAIT_S)
    assert answer.status_code == 400
    assert "bypass" in answer.json()["error"]
    eventually(lambda: server.metric("penstock_cache_requests", model="cached", outcome="hit") == 2, "two hits")
    eventually(lambda: server.metric("penstock_cache_requests", model="cached", outcome="miss") == 3, "three misses")


async def test_protocols_share_answers(server: ServerProcess) -> None:
    assert not is_hit(infer(server, 5.0, 6.0, model="spoken"))
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(floats("spoken", 5.0, 6.0, request_id="mine"), timeout=WAIT_S)
    assert answer.parameters["cache"].string_param == "hit"
    assert (answer.id, answer.model_version, answered(answer)) == ("mine", "1", [5.0, 6.0])


async def test_two_hundred_identical_requests_run_once(server: ServerProcess) -> None:
    before = batches(server, "slow")
    message = floats("slow", 2000.0)  # a second or so: all of them arrive meanwhile
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer(message, timeout=WAIT_S) for _ in range(200)]
        answers: list[pb.ModelInferResponse] = await asyncio.gather(*calls)
    assert all(answered(answer) == [2000.0] for answer in answers)
    eventually(lambda: batches(server, "slow") == before + 1, "one batch")
    eventually(lambda: server.metric("penstock_cache_requests", model="slow", outcome="miss") == 1, "one miss")


def test_the_cache_can_be_inspected_and_cleared(server: ServerProcess) -> None:
    infer(server, 1.0, model="cleared")
    infer(server, 1.0, model="spoken")
    found = httpx.get(f"{server.http_url}/v1/cache", timeout=WAIT_S).json()
    (counts,) = [block for block in found["blocks"].values() if block["model"] == "cleared"]
    assert (found["store"], counts["miss"], counts["hit"]) == ("memory", 1, 0)
    assert found["entries"] > 0
    assert found["bytes"] > 0
    answer = httpx.delete(f"{server.http_url}/v1/cache", params={"model": "cleared"}, timeout=WAIT_S)
    assert answer.status_code == 200
    assert not is_hit(infer(server, 1.0, model="cleared"))
    assert is_hit(infer(server, 1.0, model="spoken"))


def test_sqlite_keeps_answers_over_a_restart(models: Path, tmp_path: Path) -> None:
    environment = {"PENSTOCK_RESPONSE_CACHE__URL": "sqlite://"}
    with ServerProcess(models, tmp_path / "server", environment=environment) as server:
        assert not is_hit(infer(server, 1.0))
    assert (tmp_path / "server/data/cache-gateway-0.db").exists()
    with ServerProcess(models, tmp_path / "server", environment=environment) as server:
        assert is_hit(infer(server, 1.0))
        assert batches(server) == 0
    # Other files under the same version: their answers differ.
    (models / "cached/1/model.onnx").unlink()
    (models / "cached/1").rmdir()
    (models / "cached/model.yaml").unlink()
    write_slow(models, "cached", CACHED)
    with ServerProcess(models, tmp_path / "server", environment=environment) as server:
        assert not is_hit(infer(server, 1.0))


def test_gateways_share_redis_and_continue_after_its_death(models: Path, tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey") as valkey:
        environment = {"PENSTOCK_RESPONSE_CACHE__URL": valkey.url}
        with ServerProcess(models, tmp_path / "server", "--gateways", "2", environment=environment) as server:
            infer(server, 1.0)
            for _ in range(20):  # by either gateway
                assert is_hit(infer(server, 1.0))
            valkey.kill()
            for number in range(20):
                assert not is_hit(infer(server, float(number)))
            eventually(lambda: server.metric("penstock_cache_errors") > 0, "errors are counted")
            valkey.start()
            eventually(lambda: is_hit(infer(server, 3.0)), "it is used again")
            away = [line for line in log_lines(server.log) if line["event"] == "cache_unavailable"]
            assert 1 <= len(away) <= 2  # one entry of each gateway
