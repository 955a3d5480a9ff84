"""What a model's folder tells before it is loaded."""

from pathlib import Path

import pytest

from penstock.core.settings import Instances, Sessions
from penstock.models.folder import read_model_folder
from penstock.models.settings import ModelSettings
from penstock.models.survey import Surveyed, fingerprint_of, instance_count, model_files, survey, undescribed
from penstock.worker.residency.steps import Assigned


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "model.yaml").write_text("task: tensor\nresidence: {load: lazy, idle_unload_s: 7, max_waiting_s: 8}\n")
    (folder / "1" / "model.onnx").write_bytes(b"graph")
    (folder / "1" / "weights.bin").write_bytes(b"w" * 100)
    return folder


def assigned(folder: Path, version: str = "1") -> Assigned:
    return Assigned("blk-m", "m", version, str(folder), 1)


def fingerprint(folder: Path) -> str:
    found = read_model_folder(folder)
    return fingerprint_of(found.path, model_files(found, "1"))


def test_settings_and_size_are_told(model: Path) -> None:
    ((block, found),) = survey([assigned(model)])
    assert block == assigned(model)
    assert isinstance(found, Surveyed)
    assert found.files_bytes == 105 + (model / "model.yaml").stat().st_size
    outlook = found.outlook()
    assert (outlook.is_lazy, outlook.idle_unload_s, outlook.max_waiting_s, outlook.keep_s) == (True, 7.0, 8.0, 0.0)


def test_what_is_wrong_is_told_of_that_block_alone(model: Path) -> None:
    (_, missing), (_, found) = survey([assigned(model, "3"), assigned(model)])
    assert missing == f"{model}: version 3 is not there any more"
    assert isinstance(found, Surveyed)
    (model / "model.yaml").write_text("task: nonsense\n")
    ((_, wrong),) = survey([assigned(model)])
    assert isinstance(wrong, str)
    assert "model.yaml:1" in wrong


def test_the_fingerprint_follows_from_the_files_alone(model: Path, tmp_path: Path) -> None:
    first = fingerprint(model)
    copy = tmp_path / "elsewhere" / "n"
    (copy / "1").mkdir(parents=True)
    for file in ("model.yaml", "1/model.onnx", "1/weights.bin"):
        (copy / file).write_bytes((model / file).read_bytes())
    assert fingerprint(copy) == first
    (copy / "1" / "__pycache__").mkdir()
    (copy / "1" / "__pycache__" / "model.pyc").write_bytes(b"x")
    assert fingerprint(copy) == first, "what running it leaves behind is not the model"


@pytest.mark.parametrize("changed", ["model.yaml", "1/model.onnx", "1/weights.bin", "1/tokenizer.json"])
def test_any_other_file_is_another_fingerprint(model: Path, changed: str) -> None:
    first = fingerprint(model)
    with (model / changed).open("ab") as file:
        file.write(b"\n")
    assert fingerprint(model) != first


def test_a_block_that_was_never_loaded_says_so(model: Path) -> None:
    settings = ModelSettings(instances=Instances(count=3))
    block = undescribed(assigned(model), settings)
    assert not block.is_described
    assert (block.block_id, block.model, block.version, block.platform) == ("blk-m", "m", "1", "")
    assert (block.inputs, block.outputs, block.max_batch_size, block.instances) == ((), (), 0, 3)
    assert block.settings == settings.for_block()


def test_a_model_with_state_has_one_instance_and_is_kept_for_its_sessions() -> None:
    settings = ModelSettings(sessions=Sessions(is_stateful=True, idle_s=40.0))
    assert instance_count(settings) == 1
    assert Surveyed(settings, 0).outlook().keep_s == 40.0
    assert instance_count(ModelSettings(instances=Instances(count=2))) == 2
