"""Sessions of a Python model: its state, its hooks, and crashes."""

import os
import signal

import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import EngineFailed
from penstock.engines.engine_protocols import CallContext, EngineSpec
from penstock.engines.python.python_engine import PythonEngine
from penstock.models.folder import read_model_folder
from tests.unit.engines.python.conftest import MODELS, StartPython, host_pids, left_behind

SESSIONS = (
    "sessions.py",
    [("X", "FP32", (1,))],
    [("COUNT", "INT32", (1,)), ("CALLS", "BYTES", (-1,))],
)
X = {"X": np.zeros(1, np.float32)}


def step(
    engine: PythonEngine, session_id: str, *, instance: int = 0, is_start: bool = False, is_end: bool = False
) -> tuple[int, list[str]]:
    """Return how many requests the session has seen, and the hooks that were called since the last request."""
    context = CallContext(session_id=session_id, is_start=is_start, is_end=is_end)
    count, calls = engine.infer_with(instance, X, [], context)
    return int(count[0]), [call.decode() for call in calls]


def test_the_example_counts_each_session_separately() -> None:
    folder = read_model_folder(MODELS / "session_counter")
    engine = PythonEngine(EngineSpec(folder.file("1"), "auto", 1, 1), folder.settings.python)
    engine.load()
    found = []
    for seq_no, (session_id, value) in enumerate([("a", 1), ("b", 10), ("a", 2), ("a", 3), ("b", 20)], start=1):
        context = CallContext(session_id=session_id, seq_no=seq_no, is_start=seq_no <= 2)
        total, seen = engine.infer_with(0, {"INPUT": np.array([value], np.int32)}, ["SUM", "SEEN"], context)
        found.append((session_id, int(total[0]), seen.tolist()))
    assert found == [("a", 1, [1]), ("b", 10, [2]), ("a", 3, [1, 3]), ("a", 6, [1, 3, 4]), ("b", 30, [2, 5])]
    engine.close()
    assert left_behind() == []


def test_hooks_are_called_once_and_state_ends_with_the_session(start_python: StartPython) -> None:
    engine = start_python(*SESSIONS)
    engine.load()
    assert step(engine, "") == (1, [])
    assert step(engine, "") == (1, []), "without a session nothing is kept"
    assert step(engine, "a", is_start=True) == (1, ["start a"])
    assert step(engine, "a") == (2, [])
    assert step(engine, "a", is_end=True) == (3, [])
    engine.end_session("a", "ended")
    assert step(engine, "a") == (1, ["end a ended", "start a"])
    assert step(engine, "a", is_start=True) == (1, ["end a restarted", "start a"])
    engine.end_session("a", "idle")
    engine.end_session("a", "idle")
    engine.end_session("unknown", "idle")
    assert step(engine, "") == (1, ["end a idle"])


def test_a_failing_hook_or_request_does_not_end_a_session(start_python: StartPython) -> None:
    with capture_logs() as logs:
        engine = start_python(*SESSIONS)
        engine.load()
        with pytest.raises(EngineFailed, match="not you"):
            step(engine, "unwelcome")
        assert step(engine, "clingy") == (1, ["start clingy"])
        engine.end_session("clingy", "ended")
        assert step(engine, "a") == (1, ["end clingy ended", "start a"])
        context = CallContext(parameters={"raise": True}, session_id="a")
        with pytest.raises(EngineFailed, match="as told"):
            engine.infer_with(0, X, [], context)
        assert step(engine, "a") == (3, []), "a request that fails does not end its session"
        engine.close()
    assert "RuntimeError: stay" in [entry.get("line") for entry in logs]


def test_a_session_stays_with_its_process_whichever_instance_runs_it(start_python: StartPython) -> None:
    engine = start_python(*SESSIONS, instances=2)
    engine.load()
    assert step(engine, "a", instance=0, is_start=True) == (1, ["start a"])
    assert step(engine, "b", instance=1, is_start=True) == (1, ["start b"])
    assert step(engine, "a", instance=1) == (2, [])
    assert step(engine, "b", instance=0) == (2, [])
    engine.end_session("a", "idle")
    assert step(engine, "a", instance=1, is_start=True) == (1, ["start a"])
    assert step(engine, "", instance=0) == (1, ["end a idle"])


def test_after_a_crash_a_session_is_lost_until_it_is_restarted(start_python: StartPython) -> None:
    engine = start_python(*SESSIONS)
    engine.load()
    for session_id in ("a", "b"):
        step(engine, session_id, is_start=True)
    (before,) = host_pids()
    os.kill(before, signal.SIGKILL)
    with pytest.raises(EngineFailed):  # this request is the first to notice the crash, or gets its report
        step(engine, "a")
    for session_id in ("a", "b", "a"):
        with pytest.raises(EngineFailed) as raised:
            step(engine, session_id)
        assert raised.value.message == (
            f"session '{session_id}': its state was lost when the model's process ended (signal 9, SIGKILL); "
            "start a new session"
        )
    assert step(engine, "") == (1, []), "others are served"
    assert step(engine, "a", is_start=True) == (1, ["start a"])
    assert step(engine, "a") == (2, [])
    engine.end_session("b", "idle")
    assert step(engine, "b") == (1, ["start b"]), "a session that is over can start again"
