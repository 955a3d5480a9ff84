"""Trials of `engine: auto`: choices, kept results and failures."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.core.config import Limits
from penstock.core.errors import ConfigError
from penstock.models.engine_choice import engine_trial
from penstock.models.engine_choice.candidates import EngineCandidate, EngineChoice, TrialVerdict
from penstock.models.engine_choice.chooser import FOLDER, EngineChooser
from penstock.models.engine_choice.memory import ChoiceMemory
from penstock.models.loading import LoadedModel, ModelFile, load_block, load_model
from penstock.models.model_yaml import ModelSettings

KEY = {"model": "abc"}
PLATFORMS = {"onnx": "onnxruntime_onnx", "openvino": "openvino"}
ORT, OPENVINO = EngineCandidate("onnx", "auto"), EngineCandidate("openvino", "auto")


def write_dense(folder: Path, settings: str = "engine: auto\n") -> Path:
    """Write a model that multiplies rows of 16 values by a matrix that BF16 rounds."""
    weights = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [numpy_helper.from_array(weights, "w")],
    )
    (folder / "1").mkdir(parents=True)
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "1" / "model.onnx")
    (folder / "model.yaml").write_text(settings)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    folder = write_dense(tmp_path / "dense")
    return ModelFile(folder / "1" / "model.onnx", folder / "1", ModelSettings(engine="auto"))


def choose(data_dir: Path, trial_s: float, model: ModelFile, fingerprint: str = "abc") -> EngineChoice:
    def load(settings: ModelSettings) -> LoadedModel:
        return load_model(replace(model, settings=settings))

    choice, loaded = EngineChooser(data_dir, trial_s).choose(model, fingerprint, load)
    if loaded is not None:
        assert loaded.settings.engine == choice.settings.engine
        loaded.engine.close()
    return choice


def with_settings(model: ModelFile, **given: Any) -> ModelFile:
    return ModelFile(model.file, model.folder, ModelSettings(engine="auto", **given))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[EngineCandidate]]:
    """Collect the candidates of each trial."""
    found: list[Sequence[EngineCandidate]] = []
    run = engine_trial.EngineTrial.run

    def counted(self: engine_trial.EngineTrial, candidates: Sequence[EngineCandidate], began: Any) -> Any:
        found.append(candidates)
        return run(self, candidates, began)

    monkeypatch.setattr(engine_trial.EngineTrial, "run", counted)
    return found


def test_a_trial_chooses_once_and_is_recorded(
    model: ModelFile, tmp_path: Path, trials: list[Sequence[EngineCandidate]]
) -> None:
    first = choose(tmp_path / "data", 30.0, model)
    assert first.settings.engine in ("onnx", "openvino")
    assert "times as fast as" in first.note
    assert "in a trial" in first.note
    again = choose(tmp_path / "data", 30.0, model)
    assert again == (first.settings, f"{first.note} (remembered)")
    assert len(trials) == 1
    choose(tmp_path / "data", 30.0, model, "def")  # another file needs a trial of its own
    assert len(trials) == 2
    (tmp_path / "data" / FOLDER).chmod(0o700)
    records = [json.loads(file.read_text()) for file in (tmp_path / "data" / FOLDER).iterdir()]
    assert {record["key"]["model"] for record in records} == {"abc", "def"}
    assert {"processor", "features", "cores", "instances", "onnxruntime", "openvino"} <= records[0]["key"].keys()


def test_without_a_trial_the_processor_features_decide(
    model: ModelFile, tmp_path: Path, trials: list[Sequence[EngineCandidate]]
) -> None:
    choice = choose(tmp_path / "data", 0.0, model)
    assert "the processor has" in choice.note
    assert not trials
    assert not (tmp_path / "data").exists()


def test_an_inaccurate_engine_is_not_chosen(model: ModelFile, tmp_path: Path) -> None:
    choice = choose(tmp_path, 30.0, with_settings(model, min_accuracy=2.0))
    assert choice.settings.engine == "onnx"
    assert "no other engine is accurate enough in a trial (openvino in" in choice.note
    assert "the minimum is 2" in choice.note


def test_an_engine_that_cannot_load_the_model_leaves_the_other(tmp_path: Path) -> None:
    """OpenVINO cannot load this kind of text operator."""
    values = [helper.make_tensor_value_info(name, TensorProto.STRING, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", values[:1], values[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "model.onnx"
    )
    model = ModelFile(tmp_path / "model.onnx", tmp_path, ModelSettings(engine="auto"))
    choice = choose(tmp_path / "data", 30.0, model)
    assert choice.settings.engine == "onnx"


def test_a_file_that_no_engine_loads_fails_with_the_reason(model: ModelFile, tmp_path: Path) -> None:
    model.file.write_bytes(b"no network")
    for _ in range(2):  # a failure is not kept
        with pytest.raises(ConfigError, match=r"model\.onnx"):
            choose(tmp_path / "data", 30.0, model)


def test_slow_models_have_short_trials(model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is repeated if the machine was busy, but not if the model itself is slow."""
    reason = "loading takes too long for a trial within 1e-06 s"
    assert choose(tmp_path, 1e-6, model).note.endswith(reason)
    assert "times as fast as" in choose(tmp_path, 30.0, model).note
    monkeypatch.setattr(engine_trial, "WALL_CLOCK_FACTOR", 1e9)
    for remembered in ("", " (remembered)"):
        assert choose(tmp_path / "idle", 1e-6, model).note.endswith(f"{reason}{remembered}")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', '{"chosen": ["tensorflow", "auto"]}', "\x00" * 9])
def test_a_damaged_record_is_ignored(
    model: ModelFile, tmp_path: Path, trials: list[Sequence[EngineCandidate]], damage: str
) -> None:
    choose(tmp_path, 30.0, model)
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_text(damage)
    assert choose(tmp_path, 30.0, model).settings.engine in ("onnx", "openvino")
    assert len(trials) == 2
    assert json.loads(file.read_text())["key"]["model"] == "abc"


def test_an_unwritable_record_is_mentioned_in_the_reason(model: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choice = choose(tmp_path / "file", 30.0, model)
    assert choice.note.endswith("; the result cannot be stored: Not a directory")


def test_workers_that_start_together_make_one_trial(
    model: ModelFile, tmp_path: Path, trials: list[Sequence[EngineCandidate]]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: choose(tmp_path, 30.0, model), range(4)))
    assert len({choice.settings.engine for choice in found}) == 1
    assert len(trials) == 1
    assert sum(choice.note.endswith("(remembered)") for choice in found) == 3


def test_after_waiting_too_long_the_processor_features_decide(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.engine_choice.chooser.WAIT_FACTOR", 0)
    waiting: list[str] = []

    run = engine_trial.EngineTrial.run

    def waited_for(self: engine_trial.EngineTrial, candidates: Sequence[EngineCandidate], began: Any) -> Any:
        waiting.append(choose(tmp_path, 0.1, model).note)
        return run(self, candidates, began)

    monkeypatch.setattr(engine_trial.EngineTrial, "run", waited_for)
    choose(tmp_path, 30.0, model)
    assert "another process has tried engines for this model" in waiting[0]


def test_an_engine_that_kills_its_process_is_not_tried_forever(
    model: ModelFile, tmp_path: Path, trials: list[Sequence[EngineCandidate]]
) -> None:
    choose(tmp_path, 30.0, model)
    (file,) = (tmp_path / FOLDER).iterdir()
    key = json.loads(file.read_text())["key"]
    for deaths in (1, 2):
        file.write_text(json.dumps({"key": key, "trying": "openvino", "deaths": {"openvino": deaths}}))
        choice = choose(tmp_path, 30.0, model)
        assert len(trials) == 2
    assert choice.settings.engine == "onnx"
    assert choice.note == "engine auto is onnx: the other engine has crashed workers that tried it"


def test_deaths_are_counted(tmp_path: Path) -> None:
    for deaths in range(4):
        with ChoiceMemory(tmp_path).hold_record(KEY, 1.0) as kept:
            assert kept.is_deadly(OPENVINO) == (deaths == 3)
            assert not kept.is_deadly(ORT)
            assert kept.verdict is None
            kept.record_start(ORT)
            kept.record_start(OPENVINO)
    with ChoiceMemory(tmp_path).hold_record(KEY, 1.0) as kept:
        kept.forget()
    with ChoiceMemory(tmp_path).hold_record(KEY, 1.0) as kept:
        assert not kept.is_deadly(OPENVINO)


def test_old_records_are_removed(tmp_path: Path) -> None:
    for number in range(70):
        with ChoiceMemory(tmp_path).hold_record({"model": str(number)}, 1.0) as kept:
            kept.keep(TrialVerdict(ORT, ""))
    assert len(list(tmp_path.iterdir())) == 64


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_a_block_uses_the_chosen_engine(tmp_path: Path, engine: str, is_loaded: bool) -> None:
    folder = write_dense(tmp_path / "dense")
    seen: list[tuple[ModelFile, str]] = []

    def chosen(model: ModelFile, fingerprint: str, load: Any) -> tuple[EngineChoice, LoadedModel | None]:
        seen.append((model, fingerprint))
        settings = EngineCandidate(engine, "fp32").settings(model.settings)
        return EngineChoice(settings, "because"), load(settings) if is_loaded else None

    block = load_block("blk-1", folder, "1", Limits(), choose=chosen)
    block.engine.close()
    told = block.description
    assert (told.platform, told.precision, told.note) == (PLATFORMS[engine], "fp32", "because")
    assert block.settings.engine == engine
    assert seen[0][1] == told.fingerprint
