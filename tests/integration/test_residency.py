"""Loading and unloading of models: lazy loading, idle unloading, a memory budget, reloads under load."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from onnx import TensorProto, helper

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import answered, floats, write_factor, write_model

WAIT_S = 60.0
LAZY = "residence: {load: lazy}\n"
IDLE = "residence: {load: lazy, idle_unload_s: 0.3}\n"
MB = 1024 * 1024
PADDING_BYTES = 64 * MB  # of a sparse file: it decides a model's size without using disk space


def write_large(repository: Path, name: str, settings: str = "") -> None:
    """Write a model of a few hundred bytes that takes 64 MB when it runs and returns its input."""
    graph = helper.make_graph(
        [
            helper.make_node("RandomUniform", [], ["weights"], shape=[4096, 4096], low=0.0, high=0.0),
            helper.make_node("ReduceMax", ["weights"], ["nothing"], keepdims=0),
            helper.make_node("Add", ["x", "nothing"], ["y"]),
        ],
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m"])],
    )
    write_model(repository, name, graph, f"instances: {{count: 1}}\n{settings}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("residency") / "models"
    write_factor(repository, "eager", 2.0)
    for name in ("lazy", "crowded", "asked_about", "broken"):
        write_factor(repository, name, 3.0, LAZY)
    write_factor(repository, "idle", 4.0, IDLE)
    write_factor(repository, "changing", 5.0, IDLE)
    write_large(repository, "large", IDLE)
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(models, tmp_path_factory.mktemp("server")) as running:
        yield running


def infer(server: ServerProcess, model: str, number: float) -> float:
    with grpc.insecure_channel(server.grpc) as channel:
        (found,) = answered(GRPCInferenceServiceStub(channel).ModelInfer(floats(model, number), timeout=WAIT_S))
        return found


def states(server: ServerProcess) -> dict[str, str]:
    return {block["model"]: block["state"] for block in server.status()["blocks"]}


def loads(server: ServerProcess, model: str, event: str) -> float:
    return server.metric("penstock_loads", model=model, event=event)


def has_loads(server: ServerProcess, model: str, event: str, count: int) -> bool:
    return loads(server, model, event) == count


def worker_bytes(server: ServerProcess) -> int:
    (worker,) = server.status()["workers"]
    return int(psutil.Process(worker["pid"]).memory_info().rss)


def load(server: ServerProcess, model: str) -> httpx.Response:
    return httpx.post(f"{server.http_url}/v2/repository/models/{model}/load", timeout=WAIT_S)


# --- lazy loading


def test_the_first_request_waits_for_the_load(server):
    assert states(server)["lazy"] == "dormant"
    assert loads(server, "lazy", "loaded") == 0
    assert httpx.get(f"{server.http_url}/v2/models/lazy/ready").status_code == 200
    assert infer(server, "lazy", 5.0) == 15.0
    eventually(lambda: states(server)["lazy"] == "ready", "it is known to be in memory")
    assert infer(server, "lazy", 6.0) == 18.0
    assert (loads(server, "lazy", "woken"), loads(server, "lazy", "loaded")) == (1, 1)


def test_simultaneous_first_requests_load_the_model_once(server):
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: infer(server, "crowded", number), range(24)))
    assert answers == [3.0 * number for number in range(24)]
    assert (loads(server, "crowded", "woken"), loads(server, "crowded", "loaded")) == (1, 1)


def test_a_request_for_metadata_loads_a_lazy_model(server):
    found = httpx.get(f"{server.http_url}/v2/models/asked_about", timeout=WAIT_S)
    assert found.status_code == 200, found.text
    assert [tensor["name"] for tensor in found.json()["inputs"]] == ["x"]
    assert loads(server, "asked_about", "loaded") == 1


def test_a_broken_lazy_model_shows_the_reason_until_it_is_repaired(server, models):
    file = models / "broken/1/model.onnx"
    good = file.read_bytes()
    file.write_bytes(b"no model")
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            infer(server, "broken", 1.0)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "model.onnx" in caught.value.details()
    file.write_bytes(good)
    load(server, "broken").raise_for_status()
    assert infer(server, "broken", 1.0) == 3.0


# --- idle


def test_an_idle_model_is_unloaded_and_loaded_again(server):
    for number in range(1, 4):
        assert infer(server, "idle", number) == 4.0 * number
        eventually(lambda: states(server)["idle"] == "dormant", "it was unloaded")
        eventually(partial(has_loads, server, "idle", "idle", number), "that was counted")
    metadata = httpx.get(f"{server.http_url}/v2/models/idle", timeout=WAIT_S).json()
    assert metadata["inputs"], "the inputs of an unloaded model are known"
    assert loads(server, "idle", "loaded") == 3


def test_the_memory_of_an_idle_model_is_released(server):
    before = worker_bytes(server)
    assert infer(server, "large", 1.0) == 1.0
    assert worker_bytes(server) > before + 48 * MB
    eventually(lambda: states(server)["large"] == "dormant", "it was unloaded")
    eventually(lambda: worker_bytes(server) < before + 16 * MB, "its memory went back")


# --- reloads


def test_reloads_and_idle_times_cost_no_request(server, models):
    """Good and bad files are swapped under requests; each answer is that of a good file."""
    file = models / "changing/1/model.onnx"
    assert infer(server, "changing", 1.0) == 5.0
    is_over = threading.Event()

    def ask_on() -> set[float]:
        found: set[float] = set()
        while not is_over.is_set():
            found.add(infer(server, "changing", 1.0))
        return found

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_on) for _ in range(2)]
        try:
            for factor in (6.0, 7.0, 8.0):
                eventually(lambda: infer(server, "changing", 1.0), "it is in memory")
                file.write_bytes(b"no model")
                refused = load(server, "changing")
                assert refused.status_code == 503
                assert "model.onnx" in refused.json()["error"]
                assert infer(server, "changing", 1.0) == factor - 1.0
                file.unlink()
                file.parent.rmdir()
                write_factor(models, "changing", factor, IDLE)
                load(server, "changing").raise_for_status()
                assert infer(server, "changing", 1.0) == factor
        finally:
            is_over.set()
        answers = set.union(*(future.result(WAIT_S) for future in asking))
    assert answers <= {5.0, 6.0, 7.0, 8.0}
    eventually(lambda: states(server)["changing"] == "dormant", "it rests at last")


# --- a budget


def test_models_alternate_within_a_budget(tmp_path):
    repository = tmp_path / "models"
    for factor, name in enumerate(("first", "second", "third"), start=2):
        write_factor(repository, name, float(factor))
        with (repository / name / "1/padding.bin").open("wb") as file:
            file.truncate(PADDING_BYTES)
    write_factor(repository, "vast", 9.0)
    with (repository / "vast/1/padding.bin").open("wb") as file:
        file.truncate(3 * PADDING_BYTES)
    budget = {"PENSTOCK_WORKER__MEMORY_BUDGET_BYTES": str(PADDING_BYTES * 5 // 2)}
    with ServerProcess(repository, tmp_path, environment=budget) as server:
        assert states(server) == {"first": "ready", "second": "ready", "third": "dormant", "vast": "failed"}
        (vast,) = [block for block in server.status()["blocks"] if block["model"] == "vast"]
        assert "worker.memory_budget_bytes" in vast["reason"]
        for _ in range(3):
            for factor, name in enumerate(("first", "second", "third"), start=2):
                assert infer(server, name, 5.0) == 5.0 * factor
        assert sum(loads(server, name, "evicted") for name in ("first", "second", "third")) >= 3
        with ThreadPoolExecutor(3) as pool:
            asked = [(name, float(n)) for n in range(8) for name in ("first", "second", "third")]
            answers = list(pool.map(lambda each: infer(server, *each), asked))
        factors = {"first": 2.0, "second": 3.0, "third": 4.0}
        assert answers == [factors[name] * number for name, number in asked]
