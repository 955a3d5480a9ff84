"""Writing the winner of tuning into the model's settings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.core.errors import ConfigError
from penstock.experiments.tuning.apply import apply_winner, group_changes_by_file
from penstock.experiments.tuning.model import TuneModel
from penstock.experiments.tuning.space import Configuration, Variant
from penstock.experiments.variants import Variants
from penstock.models.folder import read_model_folder
from penstock.models.model_yaml import ModelSettings
from tests.servers import write_model

SETTINGS = "batching: {max_rows: 16} # few\ninstances: {count: 1}\n"


@pytest.fixture
def model(tmp_path: Path) -> TuneModel:
    """Return a model with one matrix product, which can be quantized."""
    rng = np.random.default_rng(1)
    weights = numpy_helper.from_array(rng.standard_normal((32, 16)).astype(np.float32), "weights")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "multiply",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [weights],
    )
    write_model(tmp_path / "models", "mine", graph, SETTINGS)
    return tuned(tmp_path / "models" / "mine")


def tuned(path: Path) -> TuneModel:
    folder = read_model_folder(path)
    return TuneModel(folder.of_version(folder.versions[-1]), Variants(path.parent, path.parent.parent / "variants"))


def add_version(model: TuneModel, number: str, settings: str) -> None:
    version = model.folder.path / number
    version.mkdir()
    (version / "model.onnx").write_bytes((model.folder.path / "1" / "model.onnx").read_bytes())
    (version / "version.yaml").write_text(settings)


def settings_of(model: TuneModel, version: str) -> ModelSettings:
    return read_model_folder(model.folder.path).settings_of(version)


def test_the_winner_is_written_into_model_yaml_and_other_keys_are_kept(model: TuneModel, tmp_path: Path) -> None:
    file = model.folder.path / "model.yaml"
    before = file.read_text()
    winner = replace(model.shipped(), instances=2, threads=1, max_tokens=8)
    applied = apply_winner(model, winner, tmp_path / "before")
    assert tuned(model.folder.path).shipped() == winner
    assert applied.files == {str(file): str(tmp_path / "before" / "mine-model.yaml")}
    assert (tmp_path / "before" / "mine-model.yaml").read_text() == before
    assert "+batching: {max_rows: 16, max_tokens: 8}" in applied.diff
    assert not applied.new_folder


def test_a_key_that_the_version_sets_is_written_to_the_versions_file(model: TuneModel, tmp_path: Path) -> None:
    add_version(model, "2", "batching:\n  max_rows: 4 # as this one likes it\n")
    newest = tuned(model.folder.path)
    winner = replace(newest.shipped(), max_rows=8, max_delay_ms=1.0)
    apply_winner(newest, winner, tmp_path / "before")
    assert "  max_rows: 8 # was 4: as this one likes it\n" in (model.folder.path / "2" / "version.yaml").read_text()
    assert settings_of(model, "2").batching.max_rows == 8
    assert settings_of(model, "1").batching.max_rows == 16
    assert settings_of(model, "1").batching.max_delay_ms == 1.0


def test_other_served_versions_stay_unchanged(model: TuneModel, tmp_path: Path) -> None:
    file = model.folder.path / "model.yaml"
    file.write_text(file.read_text() + "versions: all\n")
    add_version(model, "2", "")
    newest = tuned(model.folder.path)
    applied = apply_winner(newest, replace(newest.shipped(), max_delay_ms=2.0), tmp_path / "before")
    assert list(applied.files) == [str(model.folder.path / "2" / "version.yaml")]
    assert settings_of(model, "2").batching.max_delay_ms == 2.0
    assert settings_of(model, "1").batching.max_delay_ms == 0.0


def test_a_converted_winner_becomes_a_new_version(model: TuneModel, tmp_path: Path) -> None:
    winner = model.shipped().with_variant(Variant("onnx", "int8"), max_delay_ms=1.0)
    applied = apply_winner(model, winner, tmp_path / "before")
    assert (applied.version, applied.new_folder) == ("2", str(model.folder.path / "2"))
    newest = tuned(model.folder.path)
    assert newest.version == "2"
    assert newest.shipped() == winner
    assert newest.folder.settings.versions == (2,)  # model.yaml has the choice
    assert newest.space({"x"}, 32)[0].variants == (winner.variant,)  # it is not converted again
    assert settings_of(model, "1").engine == "onnx"


def test_the_original_version_keeps_its_engine(model: TuneModel, tmp_path: Path) -> None:
    file = model.folder.path / "model.yaml"
    file.write_text(file.read_text() + "engine: openvino\n")
    other = tuned(model.folder.path)
    applied = apply_winner(other, other.shipped().with_variant(Variant("onnx", "int8")), tmp_path / "before")
    assert list(applied.files) == [str(file)]
    assert "+versions:" in applied.diff
    assert "+engine" not in applied.diff
    assert settings_of(model, "1").engine == "openvino"
    assert settings_of(model, "2").engine == "onnx"


def test_listed_versions_are_extended_by_the_new_one(model: TuneModel, tmp_path: Path) -> None:
    file = model.folder.path / "model.yaml"
    file.write_text(file.read_text() + "versions: [1]\n")
    pinned = tuned(model.folder.path)
    apply_winner(pinned, pinned.shipped().with_variant(Variant("onnx", "int8"), max_delay_ms=1.0), tmp_path / "b")
    folder = read_model_folder(model.folder.path)
    assert folder.versions == ("1", "2")
    assert folder.settings_of("2").batching.max_delay_ms == 1.0
    assert folder.settings_of("1").batching.max_delay_ms == 0.0


def test_a_failure_leaves_everything_unchanged(model: TuneModel, tmp_path: Path) -> None:
    file = model.folder.path / "model.yaml"
    before = file.read_bytes()
    wrong = model.shipped().with_variant(Variant("onnx", "int8"), max_rows=0)
    with pytest.raises(ConfigError, match="max_rows"):
        apply_winner(model, wrong, tmp_path / "before")
    assert file.read_bytes() == before
    assert sorted(child.name for child in model.folder.path.iterdir()) == ["1", "model.yaml"]


def test_a_failure_in_the_second_file_restores_the_first(model: TuneModel, tmp_path: Path) -> None:
    add_version(model, "2", "batching: {max_rows: 4}\n")
    newest = tuned(model.folder.path)
    files = [model.folder.path / "model.yaml", model.folder.path / "2" / "version.yaml"]
    before = [file.read_bytes() for file in files]
    with pytest.raises(ConfigError, match="max_rows"):
        apply_winner(newest, replace(newest.shipped(), max_rows=0, max_delay_ms=1.0), tmp_path / "before")
    assert [file.read_bytes() for file in files] == before


def test_an_unchanged_configuration_writes_nothing(model: TuneModel) -> None:
    assert group_changes_by_file(model.folder, "1", {}) == {}


def test_the_search_space_is_what_this_machine_can_run(model: TuneModel) -> None:
    space, refused = model.space({"x"}, in_flight=8)
    assert space.shipped == Configuration("onnx", "fp32", "cpu", 1, 1, None, 16, 0.0)
    assert {Variant("onnx", "fp32"), Variant("onnx", "int8"), Variant("openvino", "fp32")} <= set(space.variants)
    assert "CUDA" in refused[Variant("onnx", "fp32", "cuda")]
    assert space.max_rows == ()  # a request may have 16 rows, and with 8 in flight no batch has more
    assert space.max_tokens == (8, 1)


def test_a_candidate_is_served_from_its_own_repository(model: TuneModel, tmp_path: Path) -> None:
    shipped = model.shipped()
    file = model.folder.path / "model.yaml"
    file.write_text(file.read_text() + "cache: {enabled: true}\n")
    cached = tuned(model.folder.path)
    repository = cached.write(shipped.with_variant(Variant("openvino", "fp32"), max_tokens=4), tmp_path / "own")
    folder = read_model_folder(repository / "mine")
    assert (folder.settings.engine, folder.settings.precision) == ("openvino", "fp32")
    assert folder.settings.batching.max_tokens == 4
    assert folder.settings.batching.max_rows == 16
    assert not folder.settings.cache.enabled  # requests repeat
    assert folder.file("1").resolve() == model.folder.file("1").resolve()
    converted = cached.write(shipped.with_variant(Variant("onnx", "int8")), tmp_path / "converted")
    assert read_model_folder(converted / "mine").file("1").resolve() != model.folder.file("1").resolve()
