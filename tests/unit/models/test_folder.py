"""The files of a version and their fingerprint."""

import os
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.models.folder import fingerprint_of, model_files, read_model_folder, read_version
from tests.small_models import write_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m")


def fingerprint(folder: Path) -> str:
    found = read_model_folder(folder)
    return fingerprint_of(found.path, model_files(found, "1"))


def test_fingerprint_depends_on_the_files_only(model: Path, tmp_path: Path) -> None:
    first = fingerprint(model)
    copy = tmp_path / "elsewhere" / "n"
    (copy / "1").mkdir(parents=True)
    for file in ("model.yaml", "1/model.onnx", "1/weights.bin"):
        (copy / file).write_bytes((model / file).read_bytes())
    assert fingerprint(copy) == first
    (copy / "1" / "__pycache__").mkdir()
    (copy / "1" / "__pycache__" / "model.pyc").write_bytes(b"x")
    assert fingerprint(copy) == first, "files that a run leaves are not part of the model"


@pytest.mark.parametrize("changed", ["model.yaml", "1/model.onnx", "1/weights.bin", "1/tokenizer.json"])
def test_changed_file_changes_the_fingerprint(model: Path, changed: str) -> None:
    first = fingerprint(model)
    with (model / changed).open("ab") as file:
        file.write(b"\n")
    assert fingerprint(model) != first


def test_version_is_readable_if_others_are_broken(model: Path) -> None:
    (model / "2").mkdir()
    (model / "2" / "model.onnx").write_bytes(b"no network")
    found = read_model_folder(model)
    assert (found.versions, found.older) == (("2",), ("1",))
    assert read_version(model, "1").versions == ("1",)
    (model / "2" / "version.yaml").write_text("nonsense: 1\n")
    with pytest.raises(ConfigError, match="nonsense"):
        read_model_folder(model)
    assert read_version(model, "1").versions == ("1",), "a version that serves stays readable"
    with pytest.raises(ConfigError, match="there is no version 3"):
        read_version(model, "3")


def test_special_files_are_not_read(model: Path) -> None:
    odd = model / "1" / "odd"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("odd")):
        make(odd)
        with pytest.raises(ConfigError, match="odd: is not a regular file"):
            model_files(read_model_folder(model), "1")
        odd.unlink()
