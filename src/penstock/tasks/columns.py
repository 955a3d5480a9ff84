"""Checks that input tensors are columns: BYTES with one element per row, of shape [n] or [n, 1]."""

from collections.abc import Sequence

from penstock.core.errors import InvalidRequest, InvalidTensor
from penstock.core.tensors import BYTES, Tensor
from penstock.tasks.base import TaskRequest


def take_inputs(request: TaskRequest, inputs: list[str], expected: str) -> list[Tensor]:
    """Return the request's tensors in the order of the names `inputs`; raise an error if one is missing or unknown.

    `expected`: what the model takes, as the beginning of the error message.
    """
    names = [tensor.name for tensor in request.inputs]
    if names == inputs:
        return request.inputs
    if sorted(names) != sorted(inputs):
        raise InvalidTensor(f"{expected}; got {', '.join(map(repr, names)) or 'none'}")
    return sorted(request.inputs, key=lambda tensor: inputs.index(tensor.name))


def check_outputs(request: TaskRequest, outputs: Sequence[str]) -> None:
    if unknown := [name for name in request.outputs if name not in outputs]:
        raise InvalidTensor(f"unknown output '{unknown[0]}'; this model has {', '.join(map(repr, outputs))}")


def check_column(tensor: Tensor, expected: str, element: str) -> None:
    """Raise an error if the tensor is not a column. `element`: what an element is called in errors, such as "text"."""
    is_column = len(tensor.shape) == 1 or (len(tensor.shape) == 2 and tensor.shape[1] == 1)
    if tensor.datatype != BYTES or not is_column:
        raise InvalidTensor(f"{expected}; got {tensor.datatype} {list(tensor.shape)}")
    if tensor.shape[0] < 1:
        raise InvalidRequest(f"input '{tensor.name}' has no rows; send at least one {element}")
