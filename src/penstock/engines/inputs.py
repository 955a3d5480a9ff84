"""Checks a network's input against its specification."""

from collections.abc import Mapping

from penstock.core.errors import InvalidTensor
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec, is_shape_accepted


def checked_input(spec: TensorSpec, inputs: Mapping[str, Array]) -> Array:
    """Return the input that `spec` describes; raise InvalidTensor if it is missing or has a different type or shape."""
    if spec.name not in inputs:
        raise InvalidTensor(f"missing input '{spec.name}'")
    array = inputs[spec.name]
    if array.dtype != NUMPY_TYPES[spec.datatype]:
        raise InvalidTensor(f"input '{spec.name}' has dtype {array.dtype}; the model takes {spec.datatype}")
    if not is_shape_accepted(array.shape, spec.shape):
        raise InvalidTensor(f"input '{spec.name}' has shape {list(array.shape)}; the model takes {list(spec.shape)}")
    return array
