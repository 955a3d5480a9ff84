"""Python models: tensors, wrong answers, failures, output, and the start and end of processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import eventually
from penstock.core.errors import ConfigError, DeviceOutOfMemory, EngineFailed, InvalidTensor
from penstock.core.signature import Signature
from penstock.core.tensors import NUMPY_TYPES, TensorSpec
from penstock.core.yaml_file import read_yaml
from penstock.engines.engine_protocols import CallContext, EngineSpec
from penstock.engines.hosting import process_supervisor
from penstock.engines.python import python_process
from penstock.engines.python.python_engine import PythonEngine
from penstock.engines.python.python_model import MAX_ANSWER_BYTES, to_tensors
from penstock.models.folder import read_model_folder
from penstock.models.model_yaml import ModelSettings
from tests.unit.engines.python.conftest import MODELS, StartPython, host_pids

X = {"X": np.array([1, 2], np.float32)}
MISBEHAVING = (
    "misbehaving.py",
    [("X", "FP32", (-1,))],
    [("Y", "FP32", (-1,)), ("PID", "INT64", (1,))],
)


def do(what: str) -> CallContext:
    return CallContext(parameters={"do": what})


def pid(engine: PythonEngine, instance: int = 0) -> int:
    doubled, found = engine.infer(instance, X, [])
    assert doubled.tolist() == [2, 4]
    return int(found[0])


# --- tensors


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (1, 1)])
def test_every_datatype_round_trips(start_python: StartPython, shape: tuple[int, ...]) -> None:
    described = [(name, name, (-1, 3) if shape[1] == 3 else (1, 1)) for name in (*NUMPY_TYPES, "BYTES")]
    engine = start_python("echo.py", described, described)
    assert engine.load() == Signature(
        tuple(TensorSpec(*each) for each in described),
        tuple(TensorSpec(*each) for each in described),
        "python",
        "custom",
    )
    count = int(np.prod(shape))
    inputs = {name: np.arange(count).reshape(shape).astype(dtype) for name, dtype in NUMPY_TYPES.items()}
    for array in inputs.values():
        array.flags.writeable = False  # like a tensor received from the wire
    inputs["BYTES"] = np.array([["é", b"\0\xff", ""][i % 3] for i in range(count)], dtype=object).reshape(shape)
    found = engine.infer(0, inputs, [])
    for name, array in zip(inputs, found, strict=True):
        assert array.shape == shape
        if name != "BYTES":
            assert array.dtype == NUMPY_TYPES[name]
            assert array.tobytes() == inputs[name].tobytes()
    assert found[-1].ravel().tolist() == [["é".encode(), b"\0\xff", b""][i % 3] for i in range(count)]
    (only,) = engine.infer(0, inputs, ["INT8"])
    assert only.tobytes() == inputs["INT8"].tobytes()


def test_large_tensors_are_returned_and_never_overwritten(start_python: StartPython) -> None:
    described = [("X", "FP32", (-1, -1)), ("T", "BYTES", (-1,))]
    engine = start_python("echo.py", described, described)
    engine.load()
    kept = []
    for rows in (1, 700, 3, 5000, 700):
        inputs = {
            "X": np.random.default_rng(rows).random((rows, 1000), np.float32),
            "T": np.array([b"t" * 400] * rows, dtype=object),
        }
        kept.append((inputs, engine.infer(0, inputs, [])))
    for inputs, (numbers, texts) in kept:
        assert np.array_equal(numbers, inputs["X"])
        assert texts.tolist() == inputs["T"].tolist()


def test_a_model_can_keep_its_inputs(start_python: StartPython) -> None:
    described = [("X", "FP32", (-1,))]
    engine = start_python("echo.py", described, described)
    engine.load()
    context = CallContext(parameters={"how": "before"})
    for size in (10, 200_000):
        engine.infer_with(0, {"X": np.full(size, 1, np.float32)}, [], context)
        for number in (2, 3, 4):
            (before,) = engine.infer_with(0, {"X": np.full(size, number, np.float32)}, [], context)
            assert set(before.tolist()) == {number - 1}
        engine.infer_with(0, {"X": np.full(1, 0, np.float32)}, [], context)


def test_a_model_knows_its_name_and_the_request(start_python: StartPython) -> None:
    engine = start_python("echo.py", [("X", "BYTES", (1,))], [("X", "BYTES", (1,))], instances=2)
    engine.load()
    text = {"X": np.array([b""], dtype=object)}
    (told,) = engine.infer_with(1, text, [], CallContext(parameters={"how": "context"}))
    assert told.tolist() == [b"mine 1 1 1 1 cpu"]
    context = CallContext("r-7", {"how": "request", "a": 1.5, "b": True, "c": float("inf")}, seq_no=3)
    (told,) = engine.infer_with(0, text, [], context)
    assert told.tolist() == [b"r-7 3 [('a', 1.5), ('b', True), ('c', inf), ('how', 'request')] {}"]
    (told,) = engine.infer_with(0, text, [], CallContext(parameters={"how": "imports"}))
    assert told.tolist() == [b""], "the model's process imports only what it needs"


# --- failures


def test_a_wrong_answer_is_reported(start_python: StartPython) -> None:
    engine = start_python(*MISBEHAVING)
    engine.load()
    for what, said in {
        "miss": "infer returned no output 'Y'; python.outputs has Y, PID",
        "add": "infer returned an output 'Z'; python.outputs has Y, PID",
        "widen": "output 'Y' is FP64; python.outputs says FP32",
        "use_complex": "output 'Y' has dtype complex64; python.outputs says FP32",
        "reshape": "output 'Y' has shape [1, 2]; python.outputs says [-1]",
        "give_list": "output 'Y' is a list; it must be a NumPy array",
        "give_numbers": "output 'Y' has an element that is neither bytes nor str",
        "give_nothing": "infer returned a NoneType; it must return a dict of NumPy arrays by output name",
    }.items():
        with pytest.raises(EngineFailed) as raised:
            engine.infer_with(0, X, [], do(what))
        assert raised.value.message == said
    pid(engine)


def test_the_size_of_an_answer_is_limited() -> None:
    specs = (TensorSpec("A", "UINT8", (-1,)), TensorSpec("B", "UINT8", (-1,)))
    half = np.zeros(MAX_ANSWER_BYTES // 2, np.uint8)
    assert len(to_tensors({"A": half, "B": half}, specs)) == 2
    with pytest.raises(EngineFailed, match=r"infer returned 268435457 bytes; .* split it"):
        to_tensors({"A": half, "B": np.zeros(MAX_ANSWER_BYTES // 2 + 1, np.uint8)}, specs)


def test_an_exception_is_reported_with_its_traceback_and_affects_no_other_request(start_python: StartPython) -> None:
    engine = start_python(*MISBEHAVING)
    engine.load()
    before = pid(engine)
    with pytest.raises(EngineFailed) as raised:
        engine.infer_with(0, X, [], do("raise"))
    first, *rest = raised.value.message.splitlines()
    assert first == "the model failed: ValueError: the moon is not full"
    assert rest[0] == "Traceback (most recent call last):"
    assert "mine/1/model.py" in rest[1], "the traceback begins with the model's own code"
    assert "python_host" not in raised.value.message
    assert rest[-1] == "ValueError: the moon is not full"
    with pytest.raises(InvalidTensor, match=r"^X must not be negative$"):
        engine.infer_with(0, X, [], do("refuse"))
    with pytest.raises(DeviceOutOfMemory, match=r"CUDA out of memory"):
        engine.infer_with(0, X, [], do("fill_the_gpu"))
    assert pid(engine) == before


@pytest.mark.parametrize(
    ("what", "end", "words"),
    [
        ("exit", "exit code 3", "\ngoodbye"),
        ("leave", "exit code 4", ""),
        ("kill", "signal 9, SIGKILL", ""),
        ("segfault", "signal 11, SIGSEGV", " in do_segfault\n"),
    ],
)
def test_a_crash_is_reported_and_only_its_process_is_restarted(
    start_python: StartPython, what: str, end: str, words: str
) -> None:
    engine = start_python(*MISBEHAVING, instances=2)
    engine.load()
    before = [pid(engine, 0), pid(engine, 1)]
    with pytest.raises(EngineFailed) as raised:
        engine.infer_with(0, X, [], do(what))
    assert f"the model's process ended while it ran this request: {end}" in raised.value.message
    assert words in raised.value.message
    after = [pid(engine, 0), pid(engine, 1)]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_crash_is_noticed_although_other_processes_hold_its_socket_and_these_are_killed(
    start_python: StartPython, tmp_path: Path
) -> None:
    engine = start_python(*MISBEHAVING)
    engine.load()
    with pytest.raises(EngineFailed, match="exit code 5"):
        engine.infer_with(0, X, [], do("orphan"))
    folder = tmp_path / "mine" / "1"
    orphan, stray = (int((folder / name).read_text()) for name in ("orphan", "stray"))
    assert is_running(stray), "the stray process has left the process group"
    os.kill(stray, signal.SIGKILL)
    while is_running(orphan):  # killing takes a moment
        time.sleep(0.01)
    pid(engine)


def is_running(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("what", ["fork_and_return", "fork_and_raise"])
def test_a_forked_process_does_not_answer_instead_of_its_model(start_python: StartPython, what: str) -> None:
    engine = start_python(*MISBEHAVING)
    engine.load()
    before = pid(engine)
    for _ in range(5):
        doubled, answering = engine.infer_with(0, X, [], do(what))
        assert (doubled.tolist(), answering.tolist()) == ([2, 4], [before])
    for _ in range(20):
        assert pid(engine) == before


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lose_socket", "the process has closed its socket"),
        ("talk_nonsense", "the process sent an invalid message"),
        ("leave_a_thread", "the process has closed its socket"),
        ("close_everything", "exit code 1"),
        ("exit_in_thread", "exit code 8"),
    ],
)
def test_a_process_that_cannot_answer_is_not_awaited(start_python: StartPython, what: str, said: str) -> None:
    engine = start_python(*MISBEHAVING)
    engine.load()
    with pytest.raises(EngineFailed, match=f"the model's process ended while it ran this request: {said}"):
        engine.infer_with(0, X, [], do(what))
    pid(engine)


def test_a_hanging_model_is_killed_and_the_error_shows_its_line(start_python: StartPython) -> None:
    engine = start_python(*MISBEHAVING, hang_s=2.0)
    engine.load()
    before = pid(engine)
    with pytest.raises(EngineFailed, match=r"did not answer within 2 s; its process was ended(.|\n)* in do_hang\n"):
        engine.infer_with(0, X, [], do("hang"))
    assert pid(engine) != before


def test_a_model_is_unavailable_until_its_process_can_be_restarted(
    start_python: StartPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_supervisor, "RESTART_WAIT_S", 0.5)
    engine = start_python(*MISBEHAVING)
    engine.load()
    with pytest.raises(EngineFailed, match="exit code 6"):
        engine.infer_with(0, X, [], do("break"))
    down = "has ended and is being restarted; the request did not run"
    said = ""
    while "it is broken" not in said:  # the first error is that of its end, the next ones say why it does not start
        with pytest.raises(EngineFailed, match=down) as raised:
            engine.infer(0, X, [])
        said = raised.value.message
    assert "it is broken" in engine.probe(0)
    (tmp_path / "mine" / "1" / "broken").unlink()
    monkeypatch.setattr(process_supervisor, "RESTART_WAIT_S", 60.0)
    pid(engine)
    assert engine.probe(0) == ""


# --- probes


def test_a_probe_asks_the_process_without_running_the_model(
    start_python: StartPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_python(*MISBEHAVING)
    engine.load()
    assert engine.probe(0) == ""
    folder = tmp_path / "mine" / "1"
    running = threading.Thread(target=engine.infer_with, args=(0, X, [], do("wait")))
    running.start()
    eventually((folder / "waiting").exists, "it runs")
    assert engine.probe(0) == "", "the process is busy with a request"
    (folder / "go").touch()
    running.join()
    monkeypatch.setattr(python_process, "PING_S", 0.2)
    before = pid(engine)
    os.kill(before, signal.SIGSTOP)
    assert engine.probe(0) == "the model's process did not answer within 0.2 s"
    assert engine.probe(0) != ""
    os.kill(before, signal.SIGCONT)
    assert pid(engine) == before, "late answers to probes are not taken for answers of the model"


# --- output


def test_output_of_a_model_is_logged(start_python: StartPython) -> None:
    with capture_logs() as logs:
        engine = start_python(*MISBEHAVING)
        engine.load()
        engine.infer_with(0, X, [], do("print"))
        engine.close()
    found = [entry for entry in logs if entry["event"] == "model_output"]
    assert all((entry["model"], entry["instance"]) == ("mine", 0) for entry in found)
    assert [entry["line"] for entry in found if entry["stream"] == "stdout"] == [
        "to stdout: é",
        "read '' from stdin",
        "\ufffd without an end",
    ]
    assert [entry["line"] for entry in found if entry["stream"] == "stderr"] == ["to stderr"]


def test_a_flood_of_lines_is_truncated(start_python: StartPython) -> None:
    with capture_logs() as logs:
        engine = start_python(*MISBEHAVING)
        engine.load()
        engine.infer_with(0, X, [], do("flood"))
        pid(engine)
        engine.close()
    lines = [entry["line"] for entry in logs if entry["event"] == "model_output"]
    dropped = sum(entry["lines"] for entry in logs if entry["event"] == "model_output_dropped")
    assert len(lines) + dropped == 20_001, "each line is logged or counted"
    assert len(lines) < 10_000
    assert max(len(line) for line in lines) <= 1001


# --- start and end


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("class Model: (", "SyntaxError: "),
        ("class Other: pass", "the file has no class Model: rename the model's class, or add"),
        ("class Model:\n def __init__(self): raise RuntimeError('no weights')", "RuntimeError: no weights"),
        ("class Model: pass", "the class Model needs a method infer(self, inputs, context)"),
        ("class Model:\n def infer(self, inputs): pass", "the class Model needs a method infer(self, inputs, context)"),
        ("class Model:\n async def infer(self, inputs, context): pass", "that is not async"),
        ("class Model:\n def infer(self, i, c): yield", "a generator: set python.is_decoupled: true"),
        ("import os; os._exit(7)", "the model's process ended while it was loaded: exit code 7"),
        ("import sys; sys.exit('bye')", "the model's process ended while it was loaded: exit code 1\nbye"),
        ("import time\ndef wait(): time.sleep(3600)\nwait()", "the model did not answer within 3 s"),
    ],
)
def test_a_model_that_cannot_be_loaded_shows_the_reason(start_python: StartPython, source: str, said: str) -> None:
    engine = start_python(source, [("X", "FP32", (1,))], [("X", "FP32", (1,))], instances=2, load_s=3.0)
    with pytest.raises(ConfigError) as raised:
        engine.load()
    assert said in raised.value.message
    assert raised.value.fields["file"].endswith("mine/1/model.py")
    assert raised.value.fields["file"] in raised.value.message


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{name: X, datatype: FLOAT, shape: [1]}", "python.inputs.0.datatype: must be one of BOOL, .*, got 'FLOAT'"),
        ("{name: X, datatype: FP32, shape: [-2]}", "python.inputs.0.shape.0: must be greater than or equal to -1"),
        ("{name: X, datatype: FP32, shape: []}, {name: X, datatype: FP32, shape: []}", "'X' is declared twice"),
    ],
)
def test_wrong_tensors_in_the_settings_are_refused(wrong: str, said: str, tmp_path: Path) -> None:
    given = f"{{inputs: [{wrong}], outputs: [{{name: Y, datatype: FP32, shape: [1]}}]}}"
    (tmp_path / "model.yaml").write_text(f"engine: python\npython: {given}\n")
    with pytest.raises(ConfigError, match=rf"model\.yaml:2: .*{said}"):
        read_yaml(tmp_path / "model.yaml", ModelSettings)


def test_a_model_can_import_files_beside_it_and_its_folder_stays_unchanged(
    start_python: StartPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    source = "import beside\nclass Model:\n def infer(self, inputs, context): return beside.answer(inputs)"
    engine = start_python(source, [("X", "FP32", (-1,))], [("X", "FP32", (-1,))])
    (tmp_path / "mine" / "1" / "beside.py").write_text("def answer(inputs): return {'X': inputs['X'] + 1}")
    engine.load()
    (found,) = engine.infer(0, X, [])
    assert found.tolist() == [2, 3]
    assert sorted(child.name for child in (tmp_path / "mine" / "1").iterdir()) == ["beside.py", "model.py"]


def test_the_documented_example_works(tmp_path: Path) -> None:
    page = (MODELS.parents[2] / "docs" / "python-models.md").read_text(encoding="utf-8")
    (tmp_path / "scale" / "1").mkdir(parents=True)
    for kind, file in (("yaml", "model.yaml"), ("python", "1/model.py")):
        (tmp_path / "scale" / file).write_text(page.split(f"```{kind}\n")[1].split("```")[0])
    folder = read_model_folder(tmp_path / "scale")
    engine = PythonEngine(EngineSpec(folder.file("1"), "auto", 1, 1), folder.settings.python)
    engine.load()
    (found,) = engine.infer(0, X, ["Y"])
    assert found.tolist() == [2, 4]
    with pytest.raises(InvalidTensor, match="not finite"):
        engine.infer(0, {"X": np.array([np.nan], np.float32)}, ["Y"])
    engine.close()


def test_a_model_that_does_not_close_is_killed(start_python: StartPython, tmp_path: Path) -> None:
    engine = start_python(*MISBEHAVING, instances=2, close_s=0.5)
    engine.load()
    pids = host_pids()
    assert len(pids) == 2
    (tmp_path / "mine" / "1" / "stubborn").touch()
    engine.close()
    assert not any(psutil.pid_exists(each) for each in pids)
    with pytest.raises(EngineFailed, match="being unloaded"):
        engine.infer(0, X, [])
    engine.close()


def test_a_request_that_runs_during_close_fails(start_python: StartPython, tmp_path: Path) -> None:
    engine = start_python(*MISBEHAVING, close_s=0.2)
    engine.load()
    caught: list[EngineFailed] = []

    def infer() -> None:
        with pytest.raises(EngineFailed) as raised:
            engine.infer_with(0, X, [], do("wait"))
        caught.append(raised.value)

    running = threading.Thread(target=infer)
    running.start()
    eventually((tmp_path / "mine" / "1" / "waiting").exists, "it runs")
    engine.close()
    running.join()
    assert "signal 9, SIGKILL" in caught[0].message


WORKER = """
import sys
from pathlib import Path
import numpy as np
from penstock.engines.engine_options import PythonOptions
from penstock.engines.engine_protocols import CallContext, EngineSpec
from penstock.engines.python.python_engine import PythonEngine
engine = PythonEngine(EngineSpec(Path(sys.argv[1]), "auto", 1, 1), PythonOptions())
engine.load()
if len(sys.argv) > 2:
    engine.infer_with(0, {"X": np.zeros(1)}, [], CallContext(parameters={"do": sys.argv[2]}))
"""


def test_a_model_is_closed_when_its_worker_exits(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from pathlib import Path\n"
        "class Model:\n"
        " def infer(self, inputs, context): pass\n"
        " def close(self): Path(__file__).with_name('closed').touch()\n"
    )
    subprocess.run([sys.executable, "-c", WORKER, str(file)], stdout=subprocess.DEVNULL, check=True)
    assert file.with_name("closed").exists()


def test_a_process_ends_with_its_worker_even_if_the_worker_is_killed(tmp_path: Path) -> None:
    """Even during a request, when the process does not read its socket."""
    file = tmp_path / "mine" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text((MODELS / "misbehaving.py").read_text())
    with subprocess.Popen([sys.executable, "-c", WORKER, str(file), "wait"], stdout=subprocess.DEVNULL) as worker:
        eventually((file.parent / "waiting").exists, "it runs")
        (host,) = psutil.Process(worker.pid).children()
        worker.kill()
    psutil.wait_procs([host], timeout=30)
    assert not host.is_running() or host.status() == psutil.STATUS_ZOMBIE
