"""Runs the batches of one instance on the GPU."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from penstock.core.errors import EngineFailed, InvalidTensor, PenstockError
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec
from penstock.engines.inputs import checked_input
from penstock.engines.tensorrt.engine_build import EnginePlan
from penstock.engines.tensorrt.gpu import Gpu, PinnedBuffer, to_gpu_error
from penstock.engines.tensorrt.shapes import find_profile


class GpuExecution:
    """Runs one instance's batches with a CUDA stream, buffers, and a TensorRT context per optimization profile.

    One thread at a time may use this object.
    """

    def __init__(self, engine: Any, plan: EnginePlan, gpu: Gpu) -> None:
        self._engine = engine
        self._plan = plan
        self._gpu = gpu
        gpu.use()
        self._stream = gpu.open_stream()
        self._buffers = {spec.name: PinnedBuffer(gpu) for spec in (*plan.inputs, *plan.outputs)}
        self._contexts: dict[int, Any] = {}  # by profile

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        arrays = {spec.name: checked_input(spec, inputs) for spec in self._plan.inputs}
        self._gpu.use()
        self._plan.library.errors.clear()
        context = self._open_context(self._find_profile({name: array.shape for name, array in arrays.items()}))
        for name, array in arrays.items():
            self._upload_input(context, name, array)
        found = {spec.name: self._reserve_output_buffer(context, spec) for spec in self._plan.outputs}
        if not context.execute_async_v3(self._stream):
            raise self._to_error("TensorRT failed")
        wanted = list(outputs) or list(found)
        for name in wanted:
            buffer = self._buffers[name]
            self._gpu.download(buffer.host, buffer.device, _size_bytes(*found[name]), self._stream)
        self._gpu.synchronize(self._stream)
        return [self._copy_output(name, *found[name]) for name in wanted]

    def close(self) -> None:
        self._contexts.clear()
        self._gpu.use()
        for buffer in self._buffers.values():
            buffer.close()
        self._gpu.close_stream(self._stream)

    def _find_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        profiles = self._plan.profiles
        if not profiles:  # all sizes are fixed, and were checked before
            return 0
        index = find_profile(profiles, shapes)
        if index is None:
            name, shape = next(iter(shapes.items()))
            least, _, most = profiles[-1][name]
            raise InvalidTensor(
                f"input '{name}' has shape {list(shape)}; the engine is built for {list(least)} to {list(most)}, by "
                "batching.max_rows, the task's longest text or largest tile, or tensorrt.shapes"
            )
        return index

    def _open_context(self, profile: int) -> Any:
        if profile not in self._contexts:
            trt = self._plan.library.module
            # Allocate only the memory that this profile needs, and not that of the largest profile.
            context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE)
            if context is None or not context.set_optimization_profile_async(profile, self._stream):
                raise self._to_error("TensorRT cannot create a context of the engine")
            self._gpu.synchronize(self._stream)
            self._contexts[profile] = context
        return self._contexts[profile]

    def _to_error(self, failure: str) -> PenstockError:
        return to_gpu_error(f"{failure}: {self._plan.library.first_errors() or 'it gave no reason'}", self._gpu.device)

    def _upload_input(self, context: Any, name: str, array: Array) -> None:
        buffer, size = self._buffers[name], array.nbytes
        buffer.reserve(size)
        np.copyto(buffer.view(size).view(array.dtype).reshape(array.shape), array)
        self._gpu.upload(buffer.device, buffer.host, size, self._stream)
        context.set_input_shape(name, array.shape)
        context.set_tensor_address(name, buffer.device)

    def _reserve_output_buffer(self, context: Any, spec: TensorSpec) -> tuple[tuple[int, ...], Any]:
        """Reserve a buffer for an output; return the output's shape and type."""
        shape, dtype = tuple(context.get_tensor_shape(spec.name)), NUMPY_TYPES[spec.datatype]
        if min(shape, default=0) < 0:
            raise EngineFailed(f"the size of output '{spec.name}' depends on the input's values: use engine: onnx")
        buffer = self._buffers[spec.name]
        buffer.reserve(max(1, _size_bytes(shape, dtype)))
        context.set_tensor_address(spec.name, buffer.device)
        return shape, dtype

    def _copy_output(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Copy an output, because the next batch reuses the buffer."""
        found: Array = self._buffers[name].view(_size_bytes(shape, dtype)).copy().view(dtype).reshape(shape)
        return found


def _size_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return int(prod(shape) * dtype.itemsize)
