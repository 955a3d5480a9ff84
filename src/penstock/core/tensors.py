"""Tensors in the form of the protocols: a name, a datatype, a shape and raw little-endian bytes."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import InvalidTensor

Array = NDArray[Any]
T = TypeVar("T")
Buffer = bytes | memoryview

# The Open Inference Protocol's datatypes. BYTES has no fixed size: each element is
# a 4-byte little-endian length and then its bytes.
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
ITEM_SIZES: Mapping[str, int] = {name: dtype.itemsize for name, dtype in NUMPY_TYPES.items()}
DATATYPES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_TYPES.items()}
BYTES = "BYTES"
_unpack_length = struct.Struct("<I").unpack_from
MAX_RANK = 64
PIECE_ELEMENTS = 64 * 1024  # elements
SMALL_BYTES = 16 * 1024  # up to this size a copy is faster than a view
MAX_ARRAY_BYTES = 2**63 - 1  # numpy's limit, also for shapes without elements


@dataclass(slots=True)
class Tensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """An input or output of a model. A dimension of -1 allows any size; the shape includes the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False  # a request may leave it out


def is_shape_accepted(shape: Sequence[int], accepted: Sequence[int]) -> bool:
    """Return whether a shape matches the wanted shape, in which -1 allows any size."""
    return len(shape) == len(accepted) and all(want in (-1, size) for size, want in zip(shape, accepted, strict=True))


def check_tensor(tensor: Tensor) -> None:
    """Raise InvalidTensor unless datatype, shape and byte count agree."""
    if len(tensor.shape) > MAX_RANK:
        raise InvalidTensor(f"input '{tensor.name}' has {len(tensor.shape)} dimensions; at most {MAX_RANK} are allowed")
    if min(tensor.shape, default=0) < 0:
        raise InvalidTensor(
            f"input '{tensor.name}' has the shape {list(tensor.shape)}: a dimension must not be negative"
        )
    size = ITEM_SIZES.get(tensor.datatype)
    if 0 in tensor.shape and prod(filter(None, tensor.shape)) * (size or 8) > MAX_ARRAY_BYTES:
        raise InvalidTensor(f"input '{tensor.name}' has a shape that no array can have: {list(tensor.shape)}")
    if size is None:
        if tensor.datatype != BYTES:
            raise InvalidTensor(f"input '{tensor.name}' has unknown datatype '{tensor.datatype}'")
        return
    expected = prod(tensor.shape) * size
    if len(tensor.data) != expected:
        raise InvalidTensor(
            f"input '{tensor.name}' has {len(tensor.data)} bytes of data, "
            f"but {tensor.datatype} {list(tensor.shape)} takes {expected}"
        )


def to_array(tensor: Tensor) -> Array:
    """Return a view of the tensor's bytes, or an object array of bytes for BYTES."""
    if tensor.datatype == BYTES:
        elements = unpack_bytes(tensor)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(tensor.shape)
    return np.frombuffer(tensor.data, dtype=NUMPY_TYPES[tensor.datatype]).reshape(tensor.shape)


def from_array(name: str, array: Array) -> Tensor:
    if array.dtype == object or array.dtype.kind in "SU":
        return Tensor(name, BYTES, array.shape, pack_bytes(array.ravel().tolist()))
    datatype = DATATYPES.get(array.dtype)
    if datatype is None:
        raise InvalidTensor(f"tensor '{name}' has dtype {array.dtype}, for which there is no protocol datatype")
    if array.nbytes <= SMALL_BYTES:
        return Tensor(name, datatype, array.shape, array.tobytes())
    data = np.ascontiguousarray(array)
    # memoryview refuses dtypes that it has no format for (bfloat16), so view the array as bytes first.
    return Tensor(name, datatype, array.shape, data.view(np.uint8).data.cast("B") if data.size else b"")


def split_into_pieces(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Split values into parts, because converting all at once would block other threads and take extra memory."""
    for start in range(0, len(values), PIECE_ELEMENTS):
        yield values[start : start + PIECE_ELEMENTS]


def unpack_bytes(tensor: Tensor) -> list[bytes]:
    """Return the elements of a BYTES tensor; raise InvalidTensor if their number differs from the shape."""
    return _split_elements(tensor, bytes)


def view_bytes(tensor: Tensor) -> list[memoryview]:
    """Like `unpack_bytes`, but without copying the elements."""
    return _split_elements(tensor, memoryview)


def _split_elements(tensor: Tensor, convert: Callable[[Buffer], T]) -> list[T]:
    data, offset, elements = tensor.data, 0, []
    end, count = len(data), prod(tensor.shape)
    for _ in range(count):
        start = offset + 4
        if start > end:
            break
        offset = start + _unpack_length(data, offset)[0]
        if offset > end:
            break
        elements.append(convert(data[start:offset]))
    if offset != end or len(elements) != count:
        raise InvalidTensor(
            f"input '{tensor.name}' does not hold {list(tensor.shape)} BYTES elements: "
            f"each element is a 4-byte little-endian length and then that many bytes"
        )
    return elements


def pack_bytes(elements: Sequence[bytes | str]) -> bytes:
    if len(elements) > PIECE_ELEMENTS:
        return b"".join([pack_bytes(piece) for piece in split_into_pieces(elements)])
    parts = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else element
        parts.append(len(raw).to_bytes(4, "little"))
        parts.append(raw)
    return b"".join(parts)
