"""Conversion between tensors and arrays for every datatype, and refused tensors."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidTensor
from penstock.core.tensors import (
    NUMPY_TYPES,
    Tensor,
    check_tensor,
    from_array,
    pack_bytes,
    to_array,
    unpack_bytes,
)


@pytest.mark.parametrize("datatype", sorted(NUMPY_TYPES))
def test_every_datatype_round_trips(datatype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(NUMPY_TYPES[datatype])
    tensor = from_array("t", array)
    check_tensor(tensor)
    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    assert np.array_equal(to_array(Tensor("t", datatype, (2, 3), bytes(tensor.data))), array)


def test_bfloat16_keeps_its_bits() -> None:
    array = np.array([1.0, -2.5, np.inf], ml_dtypes.bfloat16)
    assert bytes(from_array("t", array).data) == array.tobytes()


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_bytes_round_trip(elements: list[bytes]) -> None:
    tensor = Tensor("t", "BYTES", (len(elements),), pack_bytes(elements))
    assert unpack_bytes(tensor) == elements


@given(st.binary(max_size=64), st.integers(0, 5))
def test_any_bytes_are_read_or_refused(data: bytes, count: int) -> None:
    tensor = Tensor("t", "BYTES", (count,), data)
    try:
        assert len(unpack_bytes(tensor)) == count
    except InvalidTensor:
        pass


def test_a_shape_larger_than_the_data_is_refused_without_counting_to_it() -> None:
    with pytest.raises(InvalidTensor):
        unpack_bytes(Tensor("t", "BYTES", (2**62,), b"\0\0\0\0"))


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", (2,), b"1234"),
        ("FP32", (-1,), b""),
        ("FP32", (2**40, 2**40), b""),
        ("NOPE", (1,), b"1"),
        ("INT64", (0, 2**62), b""),
        ("BYTES", (2**62, 0), b""),
    ],
)
def test_contradictory_tensors_are_refused(datatype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(InvalidTensor):
        check_tensor(Tensor("t", datatype, shape, data))


def test_non_contiguous_arrays_are_sent_in_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert bytes(from_array("t", array).data) == np.ascontiguousarray(array).tobytes()


def test_empty_and_scalar_arrays_round_trip() -> None:
    assert from_array("t", np.empty((0, 3), np.float32)).shape == (0, 3)
    assert bytes(from_array("t", np.array(2, np.float32)).data) == np.float32(2).tobytes()


def test_a_dtype_without_a_protocol_datatype_is_refused() -> None:
    with pytest.raises(InvalidTensor):
        from_array("t", np.zeros(2, np.complex64))
