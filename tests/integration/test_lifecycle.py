"""A server's life: start and its refusals, several processes behind one port, reloads, deaths, stop."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.servers import ROOT, answered, floats, floats_json, log_lines, write_factor, write_identity, write_slow

WAIT_S = 60.0
CONNECTIONS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("lifecycle") / "models"
    write_identity(repository, "identity", "FP32")
    write_identity(repository, "coming_and_going", "FP32")
    write_slow(repository, "slow", "batching: {max_rows: 1}\ninstances: {count: 1}\n")
    write_factor(repository, "changing", 2.0)
    for version in (1, 2, 10):
        write_factor(repository, "versioned", float(version), "versions: all\n", version)
    return repository


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start two gateways and two workers. The gateways listen by themselves, with grpcio."""
    flags = ("--gateways", "2", "--workers", "2", "--host", "0.0.0.0", "--insecure")
    settings = {"edge": "none", "data_plane": {"hang_s": 2.0}}
    with ServerProcess(models, tmp_path_factory.mktemp("pair"), *flags, settings=settings) as running:
        eventually(lambda: len(gateways_listening(running)) == 2, "both gateways listen")
        yield running


def gateways_listening(server: ServerProcess, status: str = psutil.CONN_LISTEN) -> set[int]:
    pids = set(server.children("gateway").values())
    return {
        connection.pid
        for connection in psutil.net_connections("inet")
        if connection.pid in pids
        and connection.status == status
        and connection.laddr
        and connection.laddr.port == server.http_port
    }


@pytest.fixture
def connections(pair: ServerProcess) -> Iterator[list[httpx.Client]]:
    """Open enough connections that both gateways get some: the kernel distributes them."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(httpx.Client(base_url=pair.http_url, timeout=WAIT_S)) for _ in range(CONNECTIONS)]
        for client in opened:
            client.get("/v2/health/live").raise_for_status()
        assert len(gateways_listening(pair, psutil.CONN_ESTABLISHED)) == 2
        yield opened


def infer(server: ServerProcess, model: str, number: float, version: str = "") -> float:
    with grpc.insecure_channel(server.grpc) as channel:
        message = floats(model, number, version=version)
        (found,) = answered(GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=WAIT_S))
        return found


# --- several gateways, several workers


def test_both_gateways_serve_and_their_metrics_are_combined(pair, connections):
    before = pair.metric("penstock_requests", model="identity", protocol="rest", code="ok")
    for number, client in enumerate(connections):
        answer = client.post("/v2/models/identity/infer", json=floats_json(number))
        assert answer.json()["outputs"][0]["data"] == [number]

    def are_counted() -> bool:
        found = {
            tuple(
                sample["value"]
                for sample in client.get("/metrics.json").json()["penstock_requests"]["samples"]
                if sample["labels"].get("model") == "identity" and sample["labels"]["protocol"] == "rest"
            )
            for client in connections
        }
        return found == {(before + CONNECTIONS,)}

    eventually(are_counted, "every gateway shows the requests of both")


def test_grpc_reaches_both_gateways(pair):
    for number in range(CONNECTIONS):
        assert infer(pair, "identity", number) == number


def test_models_are_loaded_and_unloaded_through_either_gateway(connections):
    model = "/v2/models/coming_and_going"

    def all_say(status: int) -> bool:
        return {client.get(f"{model}/ready").status_code for client in connections} == {status}

    for client in (connections[0], *connections[::6]):
        client.post("/v2/repository/models/coming_and_going/unload").raise_for_status()
        eventually(lambda: all_say(503), "every gateway knows that the model went")
        client.post("/v2/repository/models/coming_and_going/load").raise_for_status()
        eventually(lambda: all_say(200), "every gateway knows that the model came")


def test_both_workers_are_used(pair, connections):
    for client in connections:
        status = client.get("/v1/status").json()
        assert {worker["id"] for worker in status["workers"]} == {"worker-0", "worker-1"}
        assert {len(worker["blocks"]) for worker in status["workers"]} == {len(status["blocks"])}
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(infer, pair, "slow", 3000.0) for _ in range(8)]
        eventually(
            lambda: pair.metric("penstock_instances", model="slow", state="busy") == 2, "both workers compute at once"
        )
        assert [future.result(WAIT_S) for future in running] == [3000.0] * 8


def ask_rest(server: ServerProcess) -> str:
    try:
        answer = httpx.post(f"{server.http_url}/v2/models/identity/infer", json=floats_json(1.0), timeout=WAIT_S)
    except httpx.TransportError:
        return "broken"
    return "served" if answer.status_code == 200 else answer.text


def ask_grpc(server: ServerProcess) -> str:
    try:
        infer(server, "identity", 1.0)
    except grpc.RpcError as error:
        # An error of the connection, not of the server, which would give a reason.
        is_broken = error.code() is grpc.StatusCode.UNAVAILABLE and not dict(error.trailing_metadata() or ())
        return "broken" if is_broken else str(error)
    return "served"


def test_a_killed_gateway_comes_back(pair):
    old = pair.children("gateway")["gateway-0"]
    os.kill(old, signal.SIGKILL)

    def is_back() -> bool:
        listening = gateways_listening(pair)
        return len(listening) == 2 and old not in listening

    # A connection to the dead gateway breaks; the other one knows the models from its first request on.
    is_over = threading.Event()

    def ask_on(ask: Callable[[], str]) -> set[str]:
        answers: set[str] = set()
        while not is_over.is_set():
            answers.add(ask())
        return answers - {"broken"}

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_on, lambda: ask_rest(pair)), pool.submit(ask_on, lambda: ask_grpc(pair))]
        try:
            eventually(is_back, "a new gateway listens")
        finally:
            is_over.set()
        answers = set.union(*(future.result(WAIT_S) for future in asking))
    assert answers == {"served"}
    for number in range(CONNECTIONS):
        assert infer(pair, "identity", number) == number


def test_a_killed_worker_comes_back(pair):
    old = pair.children("worker")["worker-0"]
    os.kill(old, signal.SIGKILL)
    assert infer(pair, "identity", 1.0) == 1.0  # the other worker serves

    def is_back() -> bool:
        workers = {worker["id"]: worker for worker in pair.status()["workers"]}
        return workers.keys() == {"worker-0", "worker-1"} and workers["worker-0"]["pid"] != old

    eventually(is_back, "the worker is back under its name")


def test_hanging_processes_are_restarted(pair):
    """Stop processes: a stopped gateway would keep its share of the connections, a stopped worker its place."""
    before = pair.children("gateway") | pair.children("worker")
    stopped = {name: before[name] for name in ("gateway-0", "worker-0")}
    for pid in stopped.values():
        os.kill(pid, signal.SIGSTOP)

    def are_exchanged() -> bool:
        now = pair.children("gateway") | pair.children("worker")
        return now.keys() == before.keys() and not set(now.values()) & set(stopped.values())

    eventually(are_exchanged, "both are other processes")
    eventually(lambda: len(gateways_listening(pair)) == 2, "both gateways listen")
    eventually(lambda: len(pair.ready_workers()) == 2, "both workers are ready")
    for number in range(CONNECTIONS):
        assert infer(pair, "identity", number) == number
    hung = {line["process"]: line for line in log_lines(pair.log) if line["event"] == "process_hung"}
    assert {name: line["pid"] for name, line in hung.items()} == stopped
    assert {line["reason"] for line in hung.values()} == {"silent"}
    for name in stopped:
        assert pair.metric("penstock_restarts", process=name, reason="hung") == 1


# --- changes of models


def test_versions_are_served_by_policy(pair):
    assert [infer(pair, "versioned", 3.0, version) for version in ("1", "2", "10", "")] == [3.0, 6.0, 30.0, 30.0]
    assert httpx.get(f"{pair.http_url}/v2/models/versioned").json()["versions"] == ["1", "2", "10"]
    answer = httpx.post(f"{pair.http_url}/v2/models/versioned/versions/3/infer", json=floats_json(1.0))
    assert answer.status_code == 404
    assert "it has 1, 2, 10" in answer.json()["error"]


def test_a_reload_that_fails_leaves_the_old_model_serving(pair, models):
    file = models / "changing/1/model.onnx"
    good = file.read_bytes()
    load = f"{pair.http_url}/v2/repository/models/changing/load"
    assert infer(pair, "changing", 5.0) == 10.0
    file.write_bytes(b"no model")
    refused = httpx.post(load, timeout=WAIT_S)
    assert refused.status_code == 503
    assert "model.onnx" in refused.json()["error"]
    assert infer(pair, "changing", 5.0) == 10.0
    settings = models / "changing/model.yaml"
    settings.write_text("task: tensor\nbatching:\n  max_row: 3\n")
    refused = httpx.post(load, timeout=WAIT_S)
    assert refused.status_code == 400
    assert "model.yaml:3" in refused.json()["error"]
    assert infer(pair, "changing", 5.0) == 10.0
    settings.write_text("task: tensor\n")
    file.write_bytes(good)
    httpx.post(load, timeout=WAIT_S).raise_for_status()
    assert infer(pair, "changing", 5.0) == 10.0


def test_a_reload_uses_the_current_files(pair, models):
    (models / "changing/1/model.onnx").unlink()
    (models / "changing/1").rmdir()
    write_factor(models, "changing", 3.0)
    httpx.post(f"{pair.http_url}/v2/repository/models/changing/load", timeout=WAIT_S).raise_for_status()
    assert infer(pair, "changing", 5.0) == 15.0
    write_factor(models, "changing", 4.0, version=2)
    httpx.post(f"{pair.http_url}/v2/repository/models/changing/load", timeout=WAIT_S).raise_for_status()
    assert infer(pair, "changing", 5.0) == 20.0


def states(server: ServerProcess, model: str) -> dict[str, str]:
    return {block["version"]: block["state"] for block in server.status()["blocks"] if block["model"] == model}


def eventually_everywhere(server: ServerProcess, model: str, expected: dict[str, str]) -> None:
    """Wait until every gateway shows the states; the gateway that was asked shows them at once."""
    eventually(lambda: all(states(server, model) == expected for _ in range(CONNECTIONS)), f"{model} is {expected}")


def test_a_version_that_does_not_load_leaves_the_previous_one_serving(pair, models):
    """Continue with `changing`, which is at version 2."""
    load = f"{pair.http_url}/v2/repository/models/changing/load"
    (models / "changing/3").mkdir()
    (models / "changing/3/model.onnx").write_bytes(b"no model")
    refused = httpx.post(load, timeout=WAIT_S)
    assert refused.status_code == 503
    assert "version 3 failed to load" in refused.json()["error"]
    assert "still serving: version 2" in refused.json()["error"]
    eventually_everywhere(pair, "changing", {"1": "unloaded", "2": "ready", "3": "failed"})
    assert httpx.get(f"{pair.http_url}/v2/health/ready").status_code == 200
    assert httpx.get(f"{pair.http_url}/v2/models/changing/versions/3/ready").status_code == 503
    assert httpx.get(f"{pair.http_url}/v2/models/changing/ready").status_code == 200
    old = pair.children("worker")
    for pid in old.values():
        os.kill(pid, signal.SIGKILL)
    assert infer(pair, "changing", 5.0) == 20.0, "a restarted worker serves the earlier version too"
    write_factor(models, "changing", 6.0, version=4)
    httpx.post(load, timeout=WAIT_S).raise_for_status()
    assert [infer(pair, "changing", 5.0) for _ in range(CONNECTIONS)] == [30.0] * CONNECTIONS
    eventually_everywhere(pair, "changing", {"1": "unloaded", "2": "unloaded", "3": "unloaded", "4": "ready"})
    answer = httpx.post(f"{pair.http_url}/v2/models/changing/versions/2/infer", json=floats_json(1.0))
    assert (answer.status_code, answer.json()["error"]) == (503, "model 'changing' version 2 is unloaded")


def test_an_unload_finishes_accepted_requests(pair):
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(infer, pair, "slow", 2000.0) for _ in range(4)]
        eventually(lambda: pair.metric("penstock_inflight_requests") == 4, "all are taken")
        httpx.post(f"{pair.http_url}/v2/repository/models/slow/unload", timeout=WAIT_S).raise_for_status()
        assert [future.result(WAIT_S) for future in running] == [2000.0] * 4
    assert httpx.post(f"{pair.http_url}/v2/models/slow/infer", json=floats_json(1.0)).status_code == 503
    assert httpx.get(f"{pair.http_url}/v2/health/ready").status_code == 200


# --- refused starts


def serve(models: Path, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "serve", "--models", str(models), "--data-dir", str(folder / "data")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [*command, "--http-port", "0", "--grpc-port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=folder,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("settings", "line", "says"),
    [
        ("batching:\n  max_row: 4\n", 3, "unknown key 'batching.max_row'"),
        ("instances:\n  threads: 0\n", 3, "instances.threads"),
        ("engine: tensorflow\n", 2, "engine"),
    ],
)
def test_a_server_without_a_valid_model_does_not_start(tmp_path, settings, line, says):
    write_identity(tmp_path / "models", "bad", "FP32", settings)
    ended = serve(tmp_path / "models", tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert f"bad/model.yaml:{line}: " in ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_that_is_taken_refuses_the_start(pair, models, tmp_path, flag):
    port = pair.http_port if flag == "--http-port" else pair.grpc_port
    ended = serve(models, tmp_path, flag, str(port))
    assert ended.returncode == 2, ended.stderr
    assert f":{port}" in ended.stderr
    assert f"choose another {flag}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_data_directory_that_is_taken_refuses_the_start(pair, models, tmp_path):
    taken = pair.log.parent / "data"
    ended = serve(models, tmp_path, "--data-dir", str(taken))
    assert ended.returncode == 2, ended.stderr
    assert f"{taken}: another server uses this data directory (process {pair.pid})" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert {stat.S_IMODE(path.stat().st_mode) for path in taken.iterdir()} == {0o600}
    assert stat.S_IMODE(taken.stat().st_mode) == 0o700


def test_a_gateway_that_cannot_open_prevents_the_start(models, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_RESPONSE_CACHE__URL", "sqlite:///taken.db")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "taken-gateway-0.db").write_bytes(b"something else")
    ended = serve(models, tmp_path)
    assert ended.returncode == 2, ended.stderr
    (said,) = [line for line in ended.stderr.splitlines() if "is not a response cache" in line]
    assert said.startswith("penstock: ")
    assert "Traceback" not in ended.stderr


# --- stops


def block_ids(server: ServerProcess) -> dict[tuple[str, str], str]:
    return {(block["model"], block["version"]): block["block_id"] for block in server.status()["blocks"]}


def test_a_server_starts_and_stops_twice(tmp_path):
    for version in (1, 2):
        write_factor(tmp_path / "models", "versioned", float(version), "versions: all\n", version)
    flags = ("--workers", "2", "--gateways", "2")
    with ServerProcess(tmp_path / "models", tmp_path, *flags) as server:
        ids = block_ids(server)
        assert len(set(ids.values())) == 2
        folder = server.run_folder()
        assert folder.is_dir()
        family = server.family()
        assert len(family) == 4
        for pid in (*(process.pid for process in family), server.pid):
            os.kill(pid, signal.SIGHUP)  # its terminal is closed
        assert server.terminate() == 0
        assert '"restart_in_s"' not in server.log.read_text(), "the server stopped as a whole"
        assert not folder.exists()
        assert not any(process.is_running() for process in family)
    with ServerProcess(tmp_path / "models", tmp_path, *flags) as server:
        assert block_ids(server) == ids, "a client may keep a block's id over a restart"
        family = server.family()
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: not any(is_alive(process) for process in family), "nothing outlives its server")


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
