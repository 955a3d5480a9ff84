"""Tensors in JSON: lists of elements, nested or flat, to and from a tensor's bytes."""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.tensors import (
    BYTES,
    ITEM_SIZES,
    MAX_RANK,
    NUMPY_TYPES,
    PIECE_ELEMENTS,
    Array,
    Tensor,
    TensorSpec,
    pack_bytes,
    split_into_pieces,
    unpack_bytes,
)

MAX_DIMENSION = 2**63 - 1
HALF_PRECISION_DATATYPES = ("FP16", "BF16")  # the protocol defines no JSON notation for these
ELEMENT_TYPES: Mapping[str, frozenset[type]] = {
    **{name: frozenset({int}) for name in ITEM_SIZES if "INT" in name},
    **{name: frozenset({int, float}) for name in ("FP16", "BF16", "FP32", "FP64")},
    "BOOL": frozenset({bool}),
    BYTES: frozenset({str, bytes}),
}


def pack_list(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> bytes:
    if datatype in HALF_PRECISION_DATATYPES:
        raise InvalidTensor(f"input '{name}' is {datatype}, which JSON cannot hold: send it as binary data")
    flat, lengths = flatten(name, data)
    if len(flat) != prod(shape) or (len(lengths) > 1 and lengths != shape):
        raise InvalidTensor(f"'data' of input '{name}' has the shape {list(lengths)}, but 'shape' is {list(shape)}")
    return pack_elements(name, datatype, flat)


def flatten(name: str, data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the elements of a nested or flat list, and the lengths of its levels."""
    if type(data) is not list:
        raise InvalidTensor(f"'data' of input '{name}' must be a list")
    flat: list[Any] = data
    lengths = [len(flat)]
    while list in (kinds := set(map(type, flat))):
        inner = set(map(len, flat)) if len(kinds) == 1 else set()
        if len(inner) != 1 or len(lengths) == MAX_RANK:
            raise InvalidTensor(f"'data' of input '{name}' is nested unevenly, or more than {MAX_RANK} deep")
        lengths.append(inner.pop())
        flat = list(chain.from_iterable(flat))
    return flat, tuple(lengths)


def pack_elements(name: str, datatype: str, flat: Sequence[Any]) -> bytes:
    if len(flat) > PIECE_ELEMENTS:
        return b"".join([pack_elements(name, datatype, piece) for piece in split_into_pieces(flat)])
    allowed = ELEMENT_TYPES.get(datatype)
    if allowed is None:
        raise InvalidTensor(f"input '{name}' has unknown datatype '{datatype[:80]}'")
    if not allowed.issuperset(map(type, flat)):
        wanted = " or ".join(sorted({"string" if kind in (str, bytes) else kind.__name__ for kind in allowed}))
        raise InvalidTensor(f"'data' of input '{name}' has elements that are not of {datatype}'s kind ({wanted})")
    if datatype == BYTES:
        return pack_bytes(flat)
    try:
        with np.errstate(over="raise"):
            wide = np.float32 if datatype in HALF_PRECISION_DATATYPES else NUMPY_TYPES[datatype]
            return np.array(flat, dtype=wide).astype(NUMPY_TYPES[datatype], copy=False).tobytes()
    except (OverflowError, FloatingPointError) as error:
        raise InvalidTensor(f"'data' of input '{name}' has values that {datatype} cannot hold") from error


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise InvalidTensor(f"'shape' of input '{name}' must be a list of at most {MAX_RANK} whole numbers")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_DIMENSION:
            raise InvalidTensor(f"'shape' of input '{name}' has {size!r:.40}, which is not a size")
    return tuple(shape)


def is_structured(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))


def fill_shape(spec: TensorSpec, count: int) -> tuple[int, ...]:
    """Return the shape of a flat list as Triton does: the last variable dimension takes all remaining elements."""
    shape = list(spec.shape)
    fixed = prod(size for size in shape if size >= 0)
    left, rest = divmod(count, fixed) if fixed else (0, count)
    for position in reversed(range(len(shape))):
        if shape[position] < 0:
            shape[position], left = left, 1
    if rest or left != 1:
        raise InvalidTensor(f"input '{spec.name}' has {count} elements, which do not fit the shape {list(spec.shape)}")
    return tuple(shape)


def to_json_array(tensor: Tensor) -> Array:
    """Return a tensor's numbers, or raise InvalidRequest for infinities. NaN becomes null in JSON."""
    array = np.frombuffer(tensor.data, dtype=NUMPY_TYPES[tensor.datatype])
    if array.dtype.kind == "f" and np.isinf(array).any():
        raise InvalidRequest(
            f"output '{tensor.name}' has infinite values, which JSON cannot hold: request it with binary_data"
        )
    return array


def check_elements(tensor: Tensor, max_values: int) -> None:
    """Raise InvalidRequest if an output has too many elements for JSON."""
    if len(tensor.data) > max_values and (count := prod(tensor.shape)) > max_values:
        raise InvalidRequest(
            f"output '{tensor.name}' has {count} elements; in JSON at most {max_values} are allowed: "
            f"request it with binary_data"
        )


def to_json_data(tensor: Tensor, max_values: int) -> Any:
    check_elements(tensor, max_values)
    if tensor.datatype in HALF_PRECISION_DATATYPES:
        raise InvalidRequest(
            f"output '{tensor.name}' is {tensor.datatype}, which JSON cannot hold: request it with binary_data"
        )
    if tensor.datatype != BYTES:
        return to_json_array(tensor)
    try:
        return [element.decode() for element in unpack_bytes(tensor)]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"output '{tensor.name}' has bytes that are not UTF-8, which JSON cannot hold: request it with binary_data"
        ) from error
