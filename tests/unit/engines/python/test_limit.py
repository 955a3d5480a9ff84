"""The memory limit of Python models: its size, the memory that counts, and models that exceed it."""

import errno
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import eventually
from penstock.core.errors import ConfigError, EngineFailed
from penstock.engines.engine_protocols import CallContext
from penstock.engines.python import limit, python_process
from penstock.engines.python.limit import MIB, allowed_bytes, is_out_of_memory, limit_bytes
from penstock.engines.python.python_engine import PythonEngine
from penstock.telemetry.control_groups import ControlGroup
from tests.unit.engines.python.conftest import StartPython
from tests.unit.engines.python.test_python_engine import MISBEHAVING, X, do, pid

MACHINE = psutil.virtual_memory().total


# --- the limit of a process


def test_the_limit_is_the_setting_or_a_share_of_half_the_memory() -> None:
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
    monkeypatch.setattr(limit, "list_control_groups", lambda: groups)
    assert allowed_bytes() == 300
    groups.clear()
    assert allowed_bytes() == MACHINE


# --- signs that memory ran out


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
def test_memory_errors_of_libraries_are_recognized(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so
    around = KeyError("weights")
    around.__context__ = error
    error.__context__ = around
    assert is_out_of_memory(around) is is_so


# --- memory that counts


# A process of its own measures itself, because other tests leave threads in this one that allocate memory.
MEASURED = """
import mmap, os, subprocess, sys
from penstock.engines.hosting.process_usage import list_descendants, used_bytes
MIB = 2**20
before = used_bytes(os.getpid(), 0, 0)
grown = lambda excluded_bytes=0: (used_bytes(os.getpid(), excluded_bytes, 0) - before) // MIB
with mmap.mmap(-1, 64 * MIB) as shared:
    shared.write(b"x" * 64 * MIB)
    print(grown(), grown(64 * MIB))
hold = "kept = b'x' * 2**26; print(flush=True); input()"
with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(grown(), child.pid in list_descendants(os.getpid()))
    child.kill()
print(used_bytes(child.pid, 0, 0))
"""


def test_memory_of_children_counts_and_shared_memory_of_others_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=60)
    shared, without_shared, with_child, is_child, after_its_end = done.stdout.split()
    assert 60 < int(shared) < 80
    assert int(without_shared) < 20
    assert (60 < int(with_child) < 90, is_child) == (True, "True")
    assert after_its_end == "0"


# --- models that exceed the limit


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
def test_a_model_out_of_memory_names_the_line_and_restarts(start_python: StartPython, what: str, where: str) -> None:
    with capture_logs() as logs:
        engine = start(start_python)
        before = pid(engine)
        with pytest.raises(EngineFailed) as raised:
            engine.infer_with(0, X, [], do(what))
        assert raised.value.message.startswith(
            "the model ran out of memory (256 MiB: raise python.memory_mb, or look for a memory leak in the model): "
        )
        assert where in raised.value.message
        assert pid(engine) != before
    (ended,) = [entry for entry in logs if entry["event"] == "model_process_ended"]
    assert ended["reason"] == "it ran out of memory, with a limit of 256 MiB (python.memory_mb)"


def test_a_slow_leak_fails_one_request_and_is_freed(start_python: StartPython) -> None:
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


def test_a_library_that_aborts_names_the_limit(start_python: StartPython) -> None:
    engine = start(start_python)
    with pytest.raises(EngineFailed) as raised:
        engine.infer_with(0, X, [], do("abort_in_library"))
    assert "signal 6, SIGABRT, with a limit of 256 MiB (python.memory_mb)\n" in raised.value.message
    assert "in do_abort_in_library" in raised.value.message
    pid(engine)


@pytest.mark.parametrize("what", ["share", "breed"])
def test_memory_that_the_system_does_not_limit_is_measured_and_the_model_killed(
    start_python: StartPython, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(python_process, "WATCH_S", 0.1)
    engine = start(start_python)
    before = pid(engine)
    with pytest.raises(EngineFailed, match=r"its memory reached \d+ MiB, with a limit of 256 MiB") as raised:
        engine.infer_with(0, X, [], do(what))
    assert f"in do_{what}\n" in raised.value.message
    assert pid(engine) != before
    eventually(lambda: not any(is_of_group(process, before) for process in psutil.process_iter()), "all are gone")


def is_of_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_shared_memory_and_request_data_do_not_count_for_the_model(
    start_python: StartPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_process, "WATCH_S", 0.05)
    engine = start(start_python)
    before = pid(engine)
    engine.infer_with(0, X, [], do("copy"))
    large = {"X": np.ones(90 * MIB // 4, np.float32)}  # the model has this memory twice, and the engine shares it
    engine.infer_with(0, large, [], do("linger"))
    assert pid(engine) == before


def test_a_request_that_does_not_fit_is_reported(start_python: StartPython) -> None:
    engine = start(start_python, 128)
    with pytest.raises(EngineFailed, match=r"do not fit into the model's memory \(128 MiB: raise python.memory_mb"):
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
    assert "ran out of memory (200 MiB: raise python.memory_mb" in raised.value.message
    assert "self.weights = np.ones(2**28)" in raised.value.message


@pytest.mark.parametrize(
    ("runtime", "memory_mb"),
    [
        ("import onnxruntime", 512),
        # With CUDA, as the package index has it, PyTorch maps several times more than its build for the CPU.
        ("import torch; x = torch.ones(500, 500); assert float((x @ x)[0, 0]) == 500", 4096),
    ],
)
def test_runtimes_that_reserve_more_than_they_use_work(start_python: StartPython, runtime: str, memory_mb: int) -> None:
    source = f"{runtime}\nclass Model:\n def infer(self, inputs, context): return inputs\n"
    engine = start_python(source, [("X", "FP32", (-1,))], [("X", "FP32", (-1,))], memory_mb=memory_mb)
    engine.load()
    (found,) = engine.infer_with(0, X, [], CallContext())
    assert found.tolist() == [1, 2]
