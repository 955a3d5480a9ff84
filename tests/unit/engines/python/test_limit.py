"""The memory of Python models: what they may have, what is counted, and what becomes of those that take more."""

import errno
import mmap
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import eventually
from penstock.core.errors import ConfigError, EngineFailed
from penstock.engines.base import CallContext
from penstock.engines.hosting.usage import descendants, used_bytes
from penstock.engines.python import limit
from penstock.engines.python import process as python_process
from penstock.engines.python.engine import PythonEngine
from penstock.engines.python.limit import MIB, allowed_bytes, is_out_of_memory, limit_bytes
from penstock.telemetry.control_groups import ControlGroup
from tests.unit.engines.python.conftest import StartPython
from tests.unit.engines.python.test_engine import MISBEHAVING, X, do, pid

MACHINE = psutil.virtual_memory().total


# --- what a process may have


def test_the_limit_is_what_is_set_or_a_share_of_half_the_memory() -> None:
    assert limit_bytes(300, 8) == 300 * MIB
    assert limit_bytes("none", 1) is None
    alone, of_four = limit_bytes("auto", 1), limit_bytes("auto", 4)
    assert alone is not None
    assert of_four is not None
    assert abs(alone - allowed_bytes() / 2) <= MIB
    assert abs(of_four - alone / 4) <= MIB
    assert limit_bytes("auto", 10**6) == 128 * MIB


def test_a_control_group_leaves_less_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [ControlGroup("/a", 1.0, 0), ControlGroup("/", 0.0, 300), ControlGroup("/b", 0.0, 400)]
    monkeypatch.setattr(limit, "control_groups", lambda: groups)
    assert allowed_bytes() == 300
    groups.clear()
    assert allowed_bytes() == MACHINE


# --- what tells that there was no more


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("CUDA error: failed to allocate 2 GiB"), False),
        (OSError(errno.ENOENT, "No such file"), False),
        (ValueError("std::bad_alloc is a word"), False),
    ],
)
def test_libraries_have_their_own_words_for_it(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so
    around = KeyError("weights")
    around.__context__ = error
    error.__context__ = around
    assert is_out_of_memory(around) is is_so


# --- what is counted


def test_memory_is_counted_with_that_of_children_and_without_what_is_of_others() -> None:
    before = used_bytes(os.getpid(), 0, 0)
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared.write(b"x" * 64 * MIB)
        assert 60 * MIB < used_bytes(os.getpid(), 0, 0) - before < 80 * MIB
        assert used_bytes(os.getpid(), 64 * MIB, 0) - before < 20 * MIB
    hold = "kept = b'x' * 2**26; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants(os.getpid())
        assert 60 * MIB < used_bytes(os.getpid(), 0, 0) - before < 90 * MIB
        child.kill()
    assert used_bytes(child.pid, 0, 0) == 0


# --- what takes more


def start(start_python: StartPython, memory_mb: int = 256) -> PythonEngine:
    engine = start_python(*MISBEHAVING, memory_mb=memory_mb)
    engine.load()
    return engine


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("hoard", "in do_hoard\n"),
        ("hoard_arrays", "in do_hoard_arrays\n"),
        ("ask_for_too_much", "in do_ask_for_too_much\n"),
        ("wrap", "in do_wrap\n"),
    ],
)
def test_a_model_without_memory_says_where_and_begins_anew(start_python: StartPython, what: str, where: str) -> None:
    with capture_logs() as logs:
        engine = start(start_python)
        before = pid(engine)
        with pytest.raises(EngineFailed) as raised:
            engine.infer_with(0, X, [], do(what))
        assert raised.value.message.startswith(
            "the model ran out of memory (256 MiB: python.memory_mb; set more, or look for what the model keeps): "
        )
        assert where in raised.value.message
        assert pid(engine) != before
    (ended,) = [entry for entry in logs if entry["event"] == "model_process_ended"]
    assert ended["reason"] == "it ran out of memory, and it may have 256 MiB (python.memory_mb)"


def test_a_slow_leak_fails_one_request_and_is_gone(start_python: StartPython) -> None:
    engine = start(start_python)
    failures = []
    pids = {pid(engine)}
    for _ in range(60):
        try:
            engine.infer_with(0, X, [], do("leak"))
        except EngineFailed as error:
            failures.append(error.message)
        pids.add(pid(engine))
    assert len(failures) in (2, 3)
    assert all("ran out of memory (256 MiB" in message and "in do_leak" in message for message in failures)
    assert len(pids) == len(failures) + 1


def test_a_library_that_gives_up_names_the_limit(start_python: StartPython) -> None:
    engine = start(start_python)
    with pytest.raises(EngineFailed) as raised:
        engine.infer_with(0, X, [], do("abort_in_library"))
    assert "signal 6, SIGABRT, and it may have 256 MiB (python.memory_mb)\n" in raised.value.message
    assert "in do_abort_in_library" in raised.value.message
    pid(engine)


@pytest.mark.parametrize("what", ["share", "breed"])
def test_what_the_system_does_not_limit_is_seen_and_ended(
    start_python: StartPython, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(python_process, "WATCH_S", 0.1)
    engine = start(start_python)
    before = pid(engine)
    with pytest.raises(EngineFailed, match=r"its memory came to \d+ MiB, and it may have 256 MiB") as raised:
        engine.infer_with(0, X, [], do(what))
    assert f"in do_{what}\n" in raised.value.message
    assert pid(engine) != before
    eventually(lambda: not any(is_of_group(process, before) for process in psutil.process_iter()), "all are gone")


def is_of_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_what_processes_share_and_what_requests_bring_is_not_the_models(
    start_python: StartPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_process, "WATCH_S", 0.05)
    engine = start(start_python)
    before = pid(engine)
    engine.infer_with(0, X, [], do("copy"))
    large = {"X": np.ones(90 * MIB // 4, np.float32)}  # which the model has twice, and the engine shares with it
    engine.infer_with(0, large, [], do("linger"))
    assert pid(engine) == before


def test_a_request_that_does_not_fit_says_so(start_python: StartPython) -> None:
    engine = start(start_python, 128)
    with pytest.raises(EngineFailed, match=r"do not fit into the model's memory \(128 MiB: python.memory_mb"):
        engine.infer(0, {"X": np.ones(32 * MIB, np.float32)}, [])
    pid(engine)


def test_a_model_that_does_not_fit_is_not_loaded(start_python: StartPython) -> None:
    source = (
        "import numpy as np\n"
        "class Model:\n"
        " def __init__(self): self.weights = np.ones(2**28)\n"
        " def infer(self, inputs, context): pass\n"
    )
    engine = start_python(source, [("X", "FP32", (1,))], [("X", "FP32", (1,))], memory_mb=200)
    with pytest.raises(ConfigError) as raised:
        engine.load()
    assert "ran out of memory (200 MiB: python.memory_mb" in raised.value.message
    assert "self.weights = np.ones(2**28)" in raised.value.message


@pytest.mark.parametrize(
    "runtime",
    [
        "import onnxruntime",
        "import torch; x = torch.ones(500, 500); assert float((x @ x)[0, 0]) == 500",
    ],
)
def test_runtimes_that_reserve_more_than_they_use_work(start_python: StartPython, runtime: str) -> None:
    source = f"{runtime}\nclass Model:\n def infer(self, inputs, context): return inputs\n"
    engine = start_python(source, [("X", "FP32", (-1,))], [("X", "FP32", (-1,))], memory_mb=512)
    engine.load()
    (found,) = engine.infer_with(0, X, [], CallContext())
    assert found.tolist() == [1, 2]
