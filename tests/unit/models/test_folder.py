"""A version's files and what tells them from others."""

from pathlib import Path

import pytest

from penstock.models.folder import fingerprint_of, model_files, read_model_folder
from tests.small_models import write_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m")


def fingerprint(folder: Path) -> str:
    found = read_model_folder(folder)
    return fingerprint_of(found.path, model_files(found, "1"))


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
