"""A session's inputs and outputs in the memory of its device: buffers that stay, and one copy each way."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from penstock.core.tensors import Array

KEPT = 64  # shapes of inputs whose memory stays


class DeviceBinding:
    """Of one instance: used by one thread at a time. Outputs come from the session's own arena."""

    def __init__(self, session: Any, device: str, index: int) -> None:
        self._session = session
        self._device = device  # as ONNX Runtime names it: cuda, cpu
        self._index = index
        self._binding = session.io_binding()
        self._outputs = [value.name for value in session.get_outputs()]
        self._kept: OrderedDict[tuple[str, tuple[int, ...], str], Any] = OrderedDict()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        binding = self._binding
        binding.clear_binding_inputs()
        binding.clear_binding_outputs()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, self._place(name, array))
        for name in outputs or self._outputs:
            binding.bind_output(name, self._device, self._index)
        self._session.run_with_iobinding(binding)
        found: list[Array] = binding.copy_outputs_to_cpu()
        return found

    def _place(self, name: str, array: Array) -> Any:
        """The array in the device's memory, where one of its shape was before."""
        key = (name, array.shape, array.dtype.str)
        value = self._kept.pop(key, None)
        if value is None:
            shape = list(array.shape)
            value = ort.OrtValue.ortvalue_from_shape_and_type(shape, array.dtype.type, self._device, self._index)
        value.update_inplace(np.ascontiguousarray(array))
        self._kept[key] = value
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return value
