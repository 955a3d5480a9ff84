"""NumPy arrays to PyTorch's tensors and back, without a copy where none is needed."""

from typing import Any

import numpy as np
import torch

from penstock.core.errors import EngineFailed, InvalidTensor
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec, fits

_BF16 = NUMPY_TYPES["BF16"]


class _Writable:
    """Another's memory as if it could be written to: PyTorch knows no read-only tensors, and warns of each."""

    def __init__(self, array: Array) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def check_input(spec: TensorSpec, array: Array) -> None:
    if array.dtype != NUMPY_TYPES[spec.datatype]:
        raise InvalidTensor(f"input '{spec.name}' has dtype {array.dtype}; the model takes {spec.datatype}")
    if not fits(array.shape, spec.shape):
        raise InvalidTensor(f"input '{spec.name}' has shape {list(array.shape)}; the model takes {list(spec.shape)}")


def to_tensor(array: Array, device: Any) -> Any:
    """On the CPU what came off the wire is copied: a model may write to its inputs, and the bytes are not ours."""
    if array.dtype == _BF16:
        return to_tensor(array.view(np.int16), device).view(torch.bfloat16)
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if array.flags.writeable:
        return torch.from_numpy(array).to(device)
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(np.asarray(_Writable(array))).to(device)


def to_array(spec: TensorSpec, found: Any, dtype: Any, is_converted: bool) -> Array:
    """`is_converted`: the model runs in another precision than its file's, and answers as the file's would."""
    if not isinstance(found, torch.Tensor):
        raise EngineFailed(f"output '{spec.name}' of the model is a {type(found).__name__}, no tensor")
    if found.dtype != dtype and is_converted and found.is_floating_point() and dtype.is_floating_point:
        found = found.to(dtype)
    if found.dtype != dtype:
        raise EngineFailed(
            f"output '{spec.name}' of the model is {found.dtype}, but torch.outputs says {spec.datatype}: correct that"
        )
    if not fits(found.shape, spec.shape):
        raise EngineFailed(
            f"output '{spec.name}' of the model has shape {list(found.shape)}, "
            f"but torch.outputs says {list(spec.shape)}: correct that"
        )
    if found.layout is not torch.strided:
        found = found.to_dense()
    found = found.detach().cpu().resolve_neg()
    if dtype is torch.bfloat16:
        bits: Array = found.contiguous().view(torch.int16).numpy()
        return bits.view(_BF16)
    array: Array = found.numpy()
    return array
