"""One instance on the GPU: its stream, its buffers, and a context for each profile that it met."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from penstock.core.errors import EngineFailed, InvalidTensor, PenstockError
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec
from penstock.engines.inputs import take_input
from penstock.engines.tensorrt.build import EnginePlan
from penstock.engines.tensorrt.gpu import Gpu, PinnedBuffer, failure
from penstock.engines.tensorrt.shapes import find_profile


class GpuLane:
    """Used by one thread at a time."""

    def __init__(self, engine: Any, plan: EnginePlan, gpu: Gpu) -> None:
        self._engine = engine
        self._plan = plan
        self._gpu = gpu
        gpu.use()
        self._stream = gpu.open_stream()
        self._buffers = {spec.name: PinnedBuffer(gpu) for spec in (*plan.inputs, *plan.outputs)}
        self._contexts: dict[int, Any] = {}  # by profile

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        arrays = {spec.name: take_input(spec, inputs) for spec in self._plan.inputs}
        self._gpu.use()
        self._plan.library.said.clear()
        context = self._context(self._find({name: array.shape for name, array in arrays.items()}))
        for name, array in arrays.items():
            self._upload(context, name, array)
        found = {spec.name: self._place(context, spec) for spec in self._plan.outputs}
        if not context.execute_async_v3(self._stream):
            raise self._failure("TensorRT failed")
        wanted = list(outputs) or list(found)
        for name in wanted:
            buffer = self._buffers[name]
            self._gpu.download(buffer.host, buffer.device, _size_bytes(*found[name]), self._stream)
        self._gpu.synchronize(self._stream)
        return [self._read(name, *found[name]) for name in wanted]

    def close(self) -> None:
        self._contexts.clear()
        self._gpu.use()
        for buffer in self._buffers.values():
            buffer.close()
        self._gpu.close_stream(self._stream)

    def _find(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        profiles = self._plan.profiles
        if not profiles:  # no size is open, and all are checked
            return 0
        index = find_profile(profiles, shapes)
        if index is None:
            name, shape = next(iter(shapes.items()))
            least, _, most = profiles[-1][name]
            raise InvalidTensor(
                f"input '{name}' has shape {list(shape)}; the engine is built for {list(least)} to {list(most)}: "
                "batching.max_rows, the task's longest text or largest tile, or tensorrt.shapes say that"
            )
        return index

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            trt = self._plan.library.module
            # Memory as the profile needs it, not as the largest does.
            context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE)
            if context is None or not context.set_optimization_profile_async(profile, self._stream):
                raise self._failure("TensorRT cannot make a context of the engine")
            self._gpu.synchronize(self._stream)
            self._contexts[profile] = context
        return self._contexts[profile]

    def _failure(self, what: str) -> PenstockError:
        return failure(f"{what}: {self._plan.library.last_words() or 'it does not say why'}", self._gpu.device)

    def _upload(self, context: Any, name: str, array: Array) -> None:
        buffer, size = self._buffers[name], array.nbytes
        buffer.reserve(size)
        np.copyto(buffer.view(size).view(array.dtype).reshape(array.shape), array)
        self._gpu.upload(buffer.device, buffer.host, size, self._stream)
        context.set_input_shape(name, array.shape)
        context.set_tensor_address(name, buffer.device)

    def _place(self, context: Any, spec: TensorSpec) -> tuple[tuple[int, ...], Any]:
        """The shape and the type of what will be there."""
        shape, dtype = tuple(context.get_tensor_shape(spec.name)), NUMPY_TYPES[spec.datatype]
        if min(shape, default=0) < 0:
            raise EngineFailed(f"the size of output '{spec.name}' depends on the input's values: use engine: onnx")
        buffer = self._buffers[spec.name]
        buffer.reserve(max(1, _size_bytes(shape, dtype)))
        context.set_tensor_address(spec.name, buffer.device)
        return shape, dtype

    def _read(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A copy: the buffer is the next batch's."""
        found: Array = self._buffers[name].view(_size_bytes(shape, dtype)).copy().view(dtype).reshape(shape)
        return found


def _size_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return int(prod(shape) * dtype.itemsize)
