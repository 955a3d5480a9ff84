"""Conversion of JSON elements to a tensor's bytes and back, and the errors of invalid elements."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.tensors import NUMPY_TYPES, from_array
from penstock.gateway.oip.json_tensors import check_shape, flatten, pack_elements, to_json_array


def test_nested_lists_are_flattened() -> None:
    assert flatten("x", [1, "a", None]) == ([1, "a", None], (3,))
    assert flatten("x", [[[1, 2]], [[3, 4]]]) == ([1, 2, 3, 4], (2, 1, 2))
    assert flatten("x", []) == ([], (0,))
    assert flatten("x", [[], []]) == ([], (2, 0))
    deep: Any = [1]
    for _ in range(63):
        deep = [deep]
    assert flatten("x", deep) == ([1], (1,) * 64)
    with pytest.raises(InvalidTensor, match="nested unevenly, or more than 64 deep"):
        flatten("x", [deep])
    with pytest.raises(InvalidTensor, match=r"^'data' of input 'x' must be a list$"):
        flatten("x", "ab")


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_numbers_are_packed_as_their_datatype(datatype: str) -> None:
    values: list[Any] = [True, False] if datatype == "BOOL" else [1, 0]
    assert pack_elements("x", datatype, values) == np.array(values).astype(NUMPY_TYPES[datatype]).tobytes()
    assert pack_elements("x", datatype, []) == b""


def test_booleans_and_texts_are_packed() -> None:
    assert pack_elements("x", "BYTES", ["é", b"\xff"]) == b"\2\0\0\0\xc3\xa9\1\0\0\0\xff"
    assert pack_elements("x", "BF16", [0.5]) == np.array([0.5], ml_dtypes.bfloat16).tobytes()
    assert pack_elements("x", "FP64", [1, 0.5]) == np.array([1, 0.5]).tobytes()


@pytest.mark.parametrize(
    ("datatype", "values", "says"),
    [
        ("INT8", [128], "'data' of input 'x' has values that INT8 cannot hold"),
        ("UINT8", [-1], "'data' of input 'x' has values that UINT8 cannot hold"),
        ("UINT64", [2**64], "'data' of input 'x' has values that UINT64 cannot hold"),
        ("FP16", [65536], "'data' of input 'x' has values that FP16 cannot hold"),
        ("INT8", [1.0], "'data' of input 'x' has elements that are not of INT8's kind (int)"),
        ("INT8", [True], "'data' of input 'x' has elements that are not of INT8's kind (int)"),
        ("BOOL", [1], "'data' of input 'x' has elements that are not of BOOL's kind (bool)"),
        ("FP64", [None], "'data' of input 'x' has elements that are not of FP64's kind (float or int)"),
        ("BYTES", [1], "'data' of input 'x' has elements that are not of BYTES's kind (string"),
        ("FP128" * 40, [1], f"input 'x' has unknown datatype '{'FP128' * 16}'"),
    ],
)
def test_invalid_elements_are_refused(datatype: str, values: list[Any], says: str) -> None:
    with pytest.raises(InvalidTensor) as refused:
        pack_elements("x", datatype, values)
    assert refused.value.message.startswith(says)


def test_shapes_are_checked() -> None:
    assert check_shape("x", []) == ()
    assert check_shape("x", [0, 2**63 - 1]) == (0, 2**63 - 1)
    with pytest.raises(InvalidTensor, match="has 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, which is not a size"):
        check_shape("x", ["a" * 1000])


def test_json_arrays_are_flat_and_finite() -> None:
    assert to_json_array(from_array("y", np.array([[1, 2], [3, 4]], np.int16))).tolist() == [1, 2, 3, 4]
    assert np.isnan(to_json_array(from_array("y", np.array([np.nan], np.float32)))).all()
    with pytest.raises(InvalidRequest) as refused:
        to_json_array(from_array("y", np.array([1, -np.inf])))
    assert refused.value.message == (
        "output 'y' has infinite values, which JSON cannot hold: request it with binary_data"
    )
