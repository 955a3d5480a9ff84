"""A model alone on a device: milliseconds per frame."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import main as cli
from penstock.core.errors import ConfigError, DeviceOutOfMemory, InvalidRequest, PenstockError
from penstock.experiments.frames import FrameBench, FrameRun
from penstock.models.folder import read_model_folder
from penstock.models.samples.noop import write_noop

QUICK = ("--window", "0.1", "--warm-up", "0")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_noop(tmp_path / "noop")


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["bench", *arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_each_batch_size_has_its_milliseconds_per_frame(model: Path) -> None:
    found = json.loads(invoke(str(model), "--device", "cpu", "--batch-sizes", "1:4:*2", *QUICK, "--json"))
    assert (found["model"], found["device"], found["engine"], found["device_memory_bytes"]) == (
        "noop",
        "cpu",
        "onnx",
        0,
    )
    assert "processor" in found["machine"]
    assert [(step["batch_size"], step["rows"]) for step in found["steps"]] == [(1, 1), (2, 2), (4, 4)]
    for step in found["steps"]:
        batch, frame = step["batch_ms"], step["ms_per_frame"]
        assert 0 < frame["p50"] <= frame["p99"]
        assert frame["p50"] == pytest.approx(batch["p50"] / step["batch_size"], abs=1e-3)
        assert step["runs"] >= 3
        assert step["frames_per_s"] > 0
        assert step["whole_ms_per_frame"]["p50"] > 0


def test_the_table_shows_engine_and_device(model: Path) -> None:
    shown = invoke(str(model), "--device", "cpu", "--batch-sizes", "2", *QUICK)
    assert "noop version 1: onnx fp32 on cpu" in shown
    assert "frames/s" in shown


def test_a_batch_size_without_memory_is_reported_and_ends_the_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FrameRun(FrameBench(read_model_folder(model), "cpu", [1, 2, 4], window_s=0.0, warm_up_s=0.0))
    with run:
        assert run._model is not None
        _, engine = run._model.batching
        real = engine.infer

        def infer(instance, inputs, outputs):
            if len(next(iter(inputs.values()))) > 1:
                raise DeviceOutOfMemory("cuda:0 is out of memory")
            return real(instance, inputs, outputs)

        monkeypatch.setattr(engine, "infer", infer)
        steps = list(run.steps())
    assert [(step.batch_size, step.problem) for step in steps] == [(1, ""), (2, "cuda:0 is out of memory")]
    assert "batch_ms" not in steps[1].to_json()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--device", "cuda:0", "--rate", "5"), InvalidRequest, "need a server"),
        (("--batch-sizes", "2"), InvalidRequest, "need --device"),
        (("--device", "gpu"), ConfigError, "cuda"),
        (("--device", "cuda", "--engine", "openvino"), ConfigError, "engine: onnx or torch"),
    ],
)
def test_unsuitable_models_are_refused(
    model: Path, arguments: tuple[str, ...], error: type[PenstockError], words: str
) -> None:
    with pytest.raises(error, match=words):
        invoke(str(model), *arguments)
