"""Inputs that `penstock infer --input` accepts."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from penstock.cli import infer_command
from penstock.client import ModelSignature
from penstock.core.errors import InvalidRequest
from penstock.core.tensors import Array, TensorSpec


def read(spec: TensorSpec, value: str) -> Array:
    return infer_command.read_inputs(ModelSignature("m", ("1",), "p", (spec,), ()), [f"{spec.name}={value}"])[spec.name]


FLOATS = TensorSpec("x", "FP32", (-1, 3))
BYTES = TensorSpec("x", "BYTES", (-1,))


def test_json_becomes_the_datatype_of_the_model() -> None:
    array = read(FLOATS, "[[1, 2, 3], [4, 5, 6]]")
    assert (array.dtype.name, array.shape) == ("float32", (2, 3))
    assert read(TensorSpec("x", "BF16", (-1,)), "[1.5]").dtype == ml_dtypes.bfloat16
    assert read(TensorSpec("x", "INT8", (1,)), "-7").tolist() == [-7]
    assert read(TensorSpec("x", "BOOL", (-1,)), "[true, false]").tolist() == [True, False]


def test_dimensions_of_one_may_be_left_out() -> None:
    assert read(FLOATS, "[1, 2, 3]").shape == (1, 3)
    assert read(TensorSpec("x", "BYTES", (-1, 1)), "text").shape == (1, 1)
    assert read(TensorSpec("x", "BYTES", (-1, 1)), '["one", "two"]').shape == (2, 1)


def test_text_and_lists_of_text_become_bytes() -> None:
    assert read(BYTES, "a = b").tolist() == ["a = b"]
    assert read(BYTES, '["a", "b"]').tolist() == ["a", "b"]
    assert read(BYTES, "[not json").tolist() == ["[not json"]


def test_files_are_read_by_their_type(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    assert read(FLOATS, f"@{tmp_path / 'x.npy'}").shape == (2, 3)
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    assert read(BYTES, f"@{tmp_path / 'photo.jpg'}").tolist() == [b"\xff\xd8"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "give \\[1, 2, 3\\] or @file.npy"),
        ("[1, 2", "not a JSON array"),
        ("[[1], [2, 3]]", "takes FP32"),
        ('["a"]', "takes FP32"),
        ("@nowhere.npy", "nowhere.npy: cannot be read"),
        ("@nowhere.bin", "nowhere.bin: cannot be read"),
    ],
)
def test_unreadable_input_is_explained(value: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(FLOATS, value)


def test_a_file_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidRequest, match="not a NumPy file of numbers"):
        read(FLOATS, f"@{tmp_path / 'x.npy'}")
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(InvalidRequest, match=r"give a \.npy file"):
        read(FLOATS, f"@{tmp_path / 'x.bin'}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["x"], "expected NAME=VALUE; model 'm' takes x FP32"),
        (["y=[1]"], "'y' is unknown"),
        (["x=[1, 2, 3]", "x=[1, 2, 3]"], "'x' is given twice"),
        ([], "'x' is missing"),
    ],
)
def test_errors_name_the_models_inputs(given: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        infer_command.read_inputs(ModelSignature("m", ("1",), "p", (FLOATS,), ()), given)


def test_outputs_are_written_to_files_whatever_their_names(tmp_path: Path) -> None:
    found = {
        "/layer/x": np.ones(2, np.float32),
        "one": np.array([b"a"], dtype=object),
        "two": np.array([b"a", b"b"], dtype=object),
    }
    written = infer_command._save(tmp_path / "out", found)
    assert {Path(file).name for files in written.values() for file in files} == {
        "_layer_x.npy",
        "one.bin",
        "two.0.bin",
        "two.1.bin",
    }
    assert np.load(tmp_path / "out" / "_layer_x.npy").tolist() == [1, 1]


def test_parameters_are_numbers_flags_or_text() -> None:
    given = ["top_k=2", "rate=0.5", "exact=true", "mode=denoise", "text=a=b", 'quoted="x"', "list=[1]"]
    assert infer_command.read_parameters(given) == {
        "top_k": 2,
        "rate": 0.5,
        "exact": True,
        "mode": "denoise",
        "text": "a=b",
        "quoted": '"x"',
        "list": "[1]",
    }
    for wrong in ("top_k", "=2"):
        with pytest.raises(InvalidRequest, match="expected NAME=VALUE"):
            infer_command.read_parameters([wrong])
