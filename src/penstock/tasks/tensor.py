"""The tensor task: passes tensors to the network, and its outputs back, without further processing."""

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.core.errors import EngineFailed, InvalidTensor, RequestTooLarge
from penstock.core.signature import Signature
from penstock.core.tensors import (
    BYTES,
    NUMPY_TYPES,
    Array,
    Tensor,
    TensorSpec,
    check_tensor,
    from_array,
    is_shape_accepted,
    to_array,
)
from penstock.tasks.base import Piece, Prepared, TaskRequest, TaskSignature

MAX_ELEMENTS = 1_000_000  # of a BYTES tensor: 160 MB at ELEMENT_BYTES each
WIDE_BYTES = 1024 * 1024  # smaller tensors are not scanned for wide characters
ELEMENT_BYTES = 160  # memory of Python, NumPy and the runtime per element, in and out
MAX_CACHED = 256  # number of shapes whose check is not repeated
WARM_UP_DIMENSION = 8  # in place of a size that the file leaves open


class TensorTask:
    """Checks tensors, and joins requests with tensors of the same shape."""

    is_prepare_cheap = True
    is_finish_cheap = True

    def __init__(
        self, model: Signature, max_rows: int, is_batched: bool | None, max_elements: int = MAX_ELEMENTS
    ) -> None:
        """If `is_batched` is None, the first dimension is a batch dimension if its size is open (-1) in all tensors."""
        tensors = (*model.inputs, *model.outputs)
        if is_batched is None:
            is_batched = all(spec.shape[:1] == (-1,) for spec in tensors)
        self._is_batched = is_batched
        self._max_rows = max_rows
        self._max_elements = max_elements
        self._inputs = {spec.name: spec for spec in model.inputs}
        self._checked_inputs: dict[
            tuple[str, str, tuple[int, ...]], int
        ] = {}  # by name, type and shape: the size of inputs that passed the check
        self._output_index = {spec.name: index for index, spec in enumerate(model.outputs)}
        self.engine_outputs: Sequence[str] = [spec.name for spec in model.outputs]
        self.signature = TaskSignature(model.inputs, model.outputs, max_rows if is_batched else 0)

    def prepare(self, request: TaskRequest) -> Prepared:
        for name in request.outputs:
            if name not in self._output_index:
                raise InvalidTensor(f"unknown output '{name}'; the model has {', '.join(self._output_index)}")
        arrays: dict[str, Array] = {}
        for tensor in request.inputs:
            spec = self._inputs.get(tensor.name)
            if spec is None or tensor.name in arrays:
                what = "unknown" if spec is None else "repeated"
                raise InvalidTensor(f"{what} input '{tensor.name}'; the model takes {', '.join(self._inputs)}")
            kind = (tensor.name, tensor.datatype, tensor.shape)
            if self._checked_inputs.get(kind) != len(tensor.data):
                _check_input(tensor, spec, self._max_elements)
                if tensor.datatype != BYTES and len(self._checked_inputs) < MAX_CACHED:
                    self._checked_inputs[kind] = len(tensor.data)
            arrays[tensor.name] = to_array(tensor)
        if len(arrays) < len(self._inputs):
            missing = [name for name in self._inputs if name not in arrays]
            raise InvalidTensor(f"missing input '{missing[0]}'; the model takes {', '.join(self._inputs)}")
        return Prepared([self._make_piece(arrays)])

    def weigh(self, request: TaskRequest) -> int:
        """Return the memory that the request's texts need as Python objects; numbers are not copied."""
        texts = [tensor for tensor in request.inputs if tensor.datatype == BYTES]
        counts = [max(0, min(prod(tensor.shape), self._max_elements)) for tensor in texts]
        return ELEMENT_BYTES * sum(counts) + sum(map(_estimate_text_bytes, texts, counts))

    def join(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        if len(pieces) == 1:
            return pieces[0].arrays
        return {name: np.concatenate([piece.arrays[name] for piece in pieces]) for name in self._inputs}

    def split(self, pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
        return split_rows(pieces, outputs)

    def finish(self, request: TaskRequest, prepared: Prepared, results: Sequence[Sequence[Array]]) -> list[Tensor]:
        wanted = request.outputs or self.engine_outputs
        return [from_array(name, results[0][self._output_index[name]]) for name in wanted]

    def warm_up_inputs(self) -> list[dict[str, Array]]:
        return [{spec.name: _make_zeros(spec, self._is_batched) for spec in self._inputs.values()}]

    def _make_piece(self, arrays: dict[str, Array]) -> Piece:
        if not self._is_batched:
            return Piece(arrays, key=object())  # unique, so that the piece is never joined
        shapes = [array.shape for array in arrays.values()]
        count = shapes[0][0]
        if len(shapes) > 1 and len(rows := {shape[0] for shape in shapes}) > 1:
            raise InvalidTensor(
                f"the inputs have different numbers of rows: {sorted(rows)}; send the same number in each input"
            )
        if count == 0:
            raise InvalidTensor("the batch has no rows: send at least one row")
        if count > self._max_rows:
            raise RequestTooLarge(
                f"the request has {count} rows; this model takes at most {self._max_rows} in one request"
            )
        return Piece(arrays, rows=count, key=tuple([shape[1:] for shape in shapes]))


def split_rows(pieces: Sequence[Piece], outputs: Sequence[Array]) -> list[Sequence[Array]]:
    """Return the rows of each piece; raise EngineFailed if an output does not have one row per row of the pieces."""
    if len(pieces) == 1:
        return [outputs]
    rows = sum(piece.rows for piece in pieces)
    if others := {len(output) if output.ndim else 0 for output in outputs} - {rows}:
        raise EngineFailed(f"the model returned {min(others)} rows for {rows} rows of input; set is_batched: false")
    results: list[Sequence[Array]] = []
    start = 0
    for piece in pieces:
        end = start + piece.rows
        results.append([output[start:end] for output in outputs])
        start = end
    return results


def _check_input(tensor: Tensor, spec: TensorSpec, max_elements: int) -> None:
    if tensor.datatype != spec.datatype:
        raise InvalidTensor(f"input '{tensor.name}' is {tensor.datatype}; the model takes {spec.datatype}")
    if not is_shape_accepted(tensor.shape, spec.shape):
        raise InvalidTensor(f"input '{tensor.name}' has shape {list(tensor.shape)}; the model takes {list(spec.shape)}")
    check_tensor(tensor)
    if tensor.datatype == BYTES and (count := prod(tensor.shape)) > max_elements:
        raise RequestTooLarge(
            f"input '{tensor.name}' has {count} elements; at most {max_elements} are allowed: split the request"
        )


def _make_zeros(spec: TensorSpec, is_batched: bool) -> Array:
    shape = [WARM_UP_DIMENSION if size < 0 else size for size in spec.shape]
    if is_batched:
        shape[0] = 1
    if spec.datatype == BYTES:
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, NUMPY_TYPES[spec.datatype])


def _estimate_text_bytes(tensor: Tensor, count: int) -> int:
    """Return the memory that an engine needs for a tensor of texts, and as many texts in the output.

    A text with a wide character takes four bytes for each of its characters.
    """
    data = tensor.data
    # A text's length prefix has at most three bytes over 127, a wide character has four.
    is_wide = len(data) > WIDE_BYTES and np.count_nonzero(np.frombuffer(data, np.int8) < 0) > 3 * count
    return (12 if is_wide else 3) * len(data)
