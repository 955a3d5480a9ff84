"""Misbehaving Python models in a real server: other models are unaffected, and errors name the cause."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.server import ServerProcess
from benchmarks.waiting import eventually
from penstock.client import Client
from penstock.core.errors import EngineFailed, ModelNotReady, PenstockError
from tests.servers import ROOT, log_lines, write_identity

WAIT_S = 90.0
PAUSE_S = 0.01
NEIGHBOUR = "neighbour"
X = np.array([1, 2], np.float32)
SETTINGS = """
engine: python
instances: {count: 1}
residence: {load: lazy}
timeouts: {request_s: LIMIT_S}
python:
  memory_mb: 256
  inputs: [{name: X, datatype: FP32, shape: [-1]}]
  outputs: [{name: Y, datatype: FP32, shape: [-1]}, {name: PID, datatype: INT64, shape: [1]}]
"""
# The caller may be told that these took too long; no other may, however busy the machine is.
TOO_LONG = {"hang", "spin"}

# The behaviour of a model, and the error that its caller gets.
ENDED = "the model's process ended while it ran this request: "
FAULTS = {
    "miss": "infer returned no output 'Y'",
    "add": "infer returned an output 'Z'",
    "widen": "output 'Y' is FP64; python.outputs says FP32",
    "reshape": r"output 'Y' has shape \[1, 2\]",
    "give_list": "output 'Y' is a list",
    "give_nothing": "infer returned a NoneType",
    "raise": "the model failed: ValueError: the moon is not full",
    "hook": "the model failed: ValueError: the moon is not full",
    "raise_at_length": "the model failed: ValueError: 水+",
    "cancel": "the model failed: asyncio.exceptions.CancelledError",
    "recurse": "the model failed: RecursionError",
    "exit": f"{ENDED}exit code 3",
    "leave": f"{ENDED}exit code 4",
    "leave_a_thread": f"{ENDED}the process has closed its socket",
    "exit_in_thread": f"{ENDED}exit code 8",
    "segfault": f"{ENDED}signal 11, SIGSEGV",
    "abort": f"{ENDED}signal 6, SIGABRT",
    "kill": f"{ENDED}signal 9, SIGKILL",
    "hang": "did not answer within 5 s; its process was ended",
    "spin": "did not answer within 5 s; its process was ended",
    "close_everything": f"{ENDED}exit code 1",
    "lose_socket": f"{ENDED}the process has closed its socket",
    "talk_nonsense": f"{ENDED}the process sent an invalid message",
    "hoard": r"the model ran out of memory \(256 MiB: raise python.memory_mb",
    "hoard_arrays": r"the model ran out of memory \(256 MiB: raise python.memory_mb",
    "abort_in_library": f"{ENDED}signal 6, SIGABRT, with a limit of 256 MiB ",
    "share": f"{ENDED}its memory reached .* with a limit of 256 MiB ",
    "breed": f"{ENDED}its memory reached .* with a limit of 256 MiB ",
}
# For some of them, the log names the place.
WHERE = {
    "raise",
    "hook",
    "cancel",
    "segfault",
    "abort",
    "hang",
    "spin",
    "lose_socket",
    "talk_nonsense",
    "hoard",
    "share",
}
# Behaviour that still gives an answer.
HARMLESS = ["print", "print_garbage", "print_much", "close_standard", "fork_and_return", "fork_and_raise"]
# Models that cannot be loaded.
BROKEN = {
    "raises": ("raise RuntimeError('no weights here')", "RuntimeError: no weights here"),
    "lacks": ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    "dies": ("import os\nos.abort()", "the model's process ended while it was loaded: signal 6, SIGABRT"),
    "swells": ("kept = b'x' * 2**30", "ran out of memory"),
}


@dataclass
class Load:
    """Sends requests to the neighbour repeatedly, and records wrong answers."""

    address: str
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with Client(self.address, timeout_s=WAIT_S) as client:
            while not self.is_over.wait(PAUSE_S):
                sent = np.array([[self.answered, 0.5]], np.float32)
                try:
                    got = client.infer(NEIGHBOUR, {"x": sent})["y"]
                except PenstockError as error:
                    self.wrong.append(repr(error))
                else:
                    if not np.array_equal(got, sent):
                        self.wrong.append(f"{sent.tolist()} became {got.tolist()}")
                self.answered += 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("python_models")
    models = folder / "models"
    write_identity(models, NEIGHBOUR, "FP32")
    misbehaving = (ROOT / "tests/data/python_models/misbehaving.py").read_text()
    for name in [*FAULTS, *HARMLESS, "leak"]:
        write_python(models / name, misbehaving)
    for name, (source, _) in BROKEN.items():
        write_python(models / name, source)
    with ServerProcess(models, folder, "--workers", "1") as running:
        yield running


def write_python(folder: Path, source: str) -> None:
    (folder / "1").mkdir(parents=True)
    limit_s = 5 if folder.name in TOO_LONG else WAIT_S
    (folder / "model.yaml").write_text(SETTINGS.replace("LIMIT_S", str(limit_s)))
    (folder / "1" / "model.py").write_text(source)


@pytest.fixture(autouse=True)
def load(server: ServerProcess) -> Iterator[Load]:
    """Run under every test, and fail if the neighbour is affected."""
    load = Load(server.grpc)
    threads = [threading.Thread(target=load.run) for _ in range(2)]
    workers = [worker["pid"] for worker in server.status()["workers"]]
    for thread in threads:
        thread.start()
    yield load
    load.is_over.set()
    for thread in threads:
        thread.join()
    assert load.wrong == []
    assert load.answered
    assert [worker["pid"] for worker in server.status()["workers"]] == workers, "the worker itself has ended"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.grpc, timeout_s=WAIT_S) as opened:
        yield opened


def ask(client: Client, model: str, do: str = "") -> list[float]:
    answer = client.infer(model, {"X": X}, parameters={"do": do} if do else {})
    found: list[float] = answer["Y"].tolist()
    return found


def answers_again(client: Client, model: str) -> bool:
    try:
        return ask(client, model) == [2, 4]
    except EngineFailed as error:
        if "is being restarted; the request did not run" in error.message:
            return False
        raise


def test_faults_are_reported_and_affect_no_other_model(client: Client, server: ServerProcess) -> None:
    def fail(name: str) -> str:
        with pytest.raises(PenstockError) as raised:
            ask(client, name, name)
        eventually(lambda: answers_again(client, name), f"{name} answers again", WAIT_S)
        return f"{raised.value.code}: {raised.value.message}"

    with ThreadPoolExecutor(6) as pool:
        found = dict(zip(FAULTS, pool.map(fail, FAULTS), strict=True))
    surprising = {name: said for name, said in found.items() if not re.match(f"engine_failed: .*{FAULTS[name]}", said)}
    assert surprising == {}
    assert not [said for said in found.values() if re.search(r"\n|Traceback|/\w+/| in do_", said)]
    logged = [line["error"] for line in log_lines(server.log) if line["event"] == "request_failed"]
    assert {name for name in WHERE if any(f" in do_{name}\n" in said for said in logged)} == WHERE


def test_allowed_results_of_a_model_are_answered(client: Client, server: ServerProcess) -> None:
    for name in HARMLESS:
        for _ in range(3):
            assert ask(client, name, name) == [2, 4], name
    printed = [line for line in log_lines(server.log) if line["event"] == "model_output"]
    assert {line["model"] for line in printed} >= {"print", "print_garbage", "print_much"}
    assert not [line for line in log_lines(server.log) if line["event"] == "not ours"]


def test_a_leak_affects_only_its_own_model(client: Client, server: ServerProcess) -> None:
    failures = []
    for _ in range(60):
        try:
            assert ask(client, "leak", "leak") == [2, 4]
        except PenstockError as error:
            failures.append(error)
    assert 1 <= len(failures) <= 3
    assert all(error.code == "engine_failed" and "ran out of memory" in error.message for error in failures)
    ended = [
        line for line in log_lines(server.log) if line["event"] == "model_process_ended" and line["model"] == "leak"
    ]
    assert ended[0]["reason"] == "it ran out of memory, with a limit of 256 MiB (python.memory_mb)"


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_loaded_shows_the_reason(client: Client, name: str) -> None:
    with pytest.raises(ModelNotReady) as raised:
        ask(client, name)
    assert BROKEN[name][1] in raised.value.message


@pytest.mark.parametrize("is_killed", [False, True])
def test_child_processes_of_a_hanging_model_are_killed(server: ServerProcess, tmp_path: Path, is_killed: bool) -> None:
    """Either when its server ends or when its worker is killed."""
    name = "fork_and_hang"
    write_python(tmp_path / "models" / name, (ROOT / "tests/data/python_models/misbehaving.py").read_text())
    drain = {"PENSTOCK_DATA_PLANE__DRAIN_S": "0.1"}
    ending = ServerProcess(tmp_path / "models", tmp_path, "--workers", "1", environment=drain)
    with ThreadPoolExecutor(1) as pool, ending, Client(ending.grpc, timeout_s=WAIT_S) as client:
        asked = pool.submit(ask, client, name, name)
        eventually(lambda: len(hosts(ending)) == 2, "it runs, and a copy of it", WAIT_S)
        left = hosts(ending)
        if is_killed:
            (worker,) = ending.status()["workers"]
            os.kill(worker["pid"], signal.SIGKILL)
        else:
            left = ending.family()
            ending.terminate()
            assert isinstance(asked.exception(WAIT_S), PenstockError)
        _, alive = psutil.wait_procs(left, timeout=WAIT_S)
        assert alive == []


def hosts(server: ServerProcess) -> list[psutil.Process]:
    found = server.family()
    return [process for process in found if "penstock.engines.python.python_host" in process.cmdline()]
