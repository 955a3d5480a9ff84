"""Decoupled Python models: answers are computed one by one, on request."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import EngineFailed
from penstock.core.requests import Parameter
from penstock.engines.engine_protocols import CallContext, EngineSpec
from penstock.engines.python.python_engine import PythonEngine
from penstock.models.folder import read_model_folder
from tests.unit.engines.python.conftest import MODELS, StartPython, left_behind

STREAMING = ("streaming.py", [("COUNT", "INT32", (1,))], [("INDEX", "INT32", (1,))])


def count(number: int) -> dict[str, np.ndarray]:
    return {"COUNT": np.array([number], np.int32)}


def context(request_id: str = "r", /, **parameters: Parameter) -> CallContext:
    return CallContext(request_id, parameters)


@pytest.fixture
def engine(start_python: StartPython) -> PythonEngine:
    engine = start_python(*STREAMING, is_decoupled=True)
    engine.load()
    return engine


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "mine" / "1" / "notes"


def indexes(engine: PythonEngine, number: int, **parameters: Parameter) -> list[int]:
    return [int(index[0]) for (index,) in engine.stream(0, count(number), [], context(**parameters))]


def test_the_example_repeats_its_input() -> None:
    folder = read_model_folder(MODELS / "repeat")
    engine = PythonEngine(EngineSpec(folder.file("1"), "auto", 1, 1), folder.settings.python)
    engine.load()
    inputs = {"VALUE": np.array([1.5, 2], np.float32), **count(3), "DELAY_MS": np.array([1], np.int32)}
    found = [(v.tolist(), i.tolist()) for v, i in engine.stream(0, inputs, ["VALUE", "INDEX"], CallContext())]
    assert found == [([1.5, 2], [0]), ([1.5, 2], [1]), ([1.5, 2], [2])]
    engine.close()
    assert left_behind() == []


def test_a_stream_has_any_number_of_answers(engine: PythonEngine) -> None:
    assert indexes(engine, 0) == []
    assert indexes(engine, 1) == [0]
    assert indexes(engine, 1000) == list(range(1000))
    assert indexes(engine, 3, **{"as": "list"}) == [0, 1, 2]
    assert indexes(engine, 3, **{"as": "dict"}) == [0]


def test_an_answer_is_computed_on_request(engine: PythonEngine, notes: Path) -> None:
    answers = engine.stream(0, count(1000), [], context())
    assert not notes.exists()
    next(answers)
    next(answers)
    assert engine.probe(0) == ""
    assert notes.read_text().split() == ["r:0", "r:1"]
    answers.close()
    assert notes.read_text().split() == ["r:0", "r:1", "r:closed"]
    assert indexes(engine, 2) == [0, 1]
    assert notes.read_text().split()[3:] == ["r:0", "r:1", "r:done"]


def test_a_stream_that_is_never_read_runs_nothing(engine: PythonEngine, notes: Path) -> None:
    engine.stream(0, count(5), [], context()).close()
    assert not notes.exists()


def test_streams_that_pause_do_not_mix(engine: PythonEngine) -> None:
    first = engine.stream(0, count(3), [], context("first"))
    second = engine.stream(0, count(3), [], context("second"))
    assert [int(next(answers)[0][0]) for answers in (first, first, second, first, second)] == [0, 1, 0, 2, 1]
    first.close()
    assert [int(index[0]) for (index,) in second] == [2]


def test_a_failure_between_answers_ends_the_stream(engine: PythonEngine) -> None:
    for wrong, said in {
        "raise_at": "RuntimeError: no more",
        "wrong_at": "infer returned an output 'VALUE'; python.outputs has INDEX",
        "exit_at": "exit code 9",
    }.items():
        answers = engine.stream(0, count(5), [], context(**{wrong: 2}))
        assert [int(next(answers)[0][0]) for _ in range(2)] == [0, 1]
        with pytest.raises(EngineFailed) as raised:
            next(answers)
        assert said in raised.value.message
        assert list(answers) == []
    with pytest.raises(EngineFailed, match="infer returned a int; a decoupled model yields dicts"):
        indexes(engine, 1, **{"as": "number"})


def test_a_stream_does_not_continue_in_another_process(engine: PythonEngine) -> None:
    answers = engine.stream(0, count(5), [], context())
    next(answers)
    with pytest.raises(EngineFailed, match="exit code 9"):
        indexes(engine, 1, exit_at=0)
    assert indexes(engine, 1) == [0]
    with pytest.raises(EngineFailed, match="has ended \\(exit code 9\\)"):
        next(answers)


def test_a_session_outlives_its_streams(engine: PythonEngine, notes: Path) -> None:
    answers = engine.stream(0, count(5), [], CallContext("r", session_id="s", is_start=True))
    next(answers)
    answers.close()
    assert notes.read_text().split() == ["r:0", "r:closed"]
    engine.end_session("s", "idle")
    assert notes.read_text().split() == ["r:0", "r:closed", "s:idle"]


def test_a_single_answer_can_be_requested_without_a_stream(engine: PythonEngine, notes: Path) -> None:
    (index,) = engine.infer(0, count(1), ["INDEX"])
    assert index.tolist() == [0]
    for number, said in {0: "gave no answer", 5: "gave more than one answer"}.items():
        with pytest.raises(EngineFailed, match=said):
            engine.infer(0, count(number), [])
    assert notes.read_text().split()[-1] == ":closed"


def test_a_model_that_is_not_decoupled_streams_one_answer(start_python: StartPython) -> None:
    engine = start_python("echo.py", [("X", "FP32", (-1,))], [("X", "FP32", (-1,))])
    engine.load()
    ((found,),) = engine.stream(0, {"X": np.array([1, 2], np.float32)}, [], CallContext())
    assert found.tolist() == [1, 2]
