"""Runs ONNX files with OpenVINO on the CPU, in BF16 if the processor supports it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.signature import Signature
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec
from penstock.engines.engine_protocols import EngineSpec

_TYPES = {ov.Type(dtype): datatype for datatype, dtype in NUMPY_TYPES.items() if datatype != "BF16"}
_TYPES[ov.Type.bf16] = "BF16"
_BF16 = NUMPY_TYPES["BF16"]
_COSTLY_OPS = ("FullyConnected", "MatMul", "Convolution")
_PRECISIONS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "i8": "int8", "u8": "int8"}


class OpenVinoEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._requests: list[Any] = []
        self._outputs: list[str] = []

    def load(self) -> Signature:
        core = ov.Core()
        precision = self._choose_precision(core)
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
            "NUM_STREAMS": str(self._spec.instances),
            "INFERENCE_NUM_THREADS": str(self._spec.threads * self._spec.instances),
            "ENABLE_CPU_PINNING": "NO",
        }
        try:
            model = core.read_model(str(self._spec.file))
            compiled = core.compile_model(model, "CPU", settings)
        except Exception as error:
            raise ConfigError(f"{self._spec.file}: OpenVINO cannot load it: {_last_line(error)}") from error
        self._requests = [compiled.create_infer_request() for _ in range(self._spec.instances + 1)]
        inputs = tuple(self._to_spec(port) for port in compiled.inputs)
        outputs = tuple(self._to_spec(port) for port in compiled.outputs)
        self._outputs = [value.name for value in outputs]
        return Signature(inputs, outputs, "openvino", _measure_precision(compiled) or precision)

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        for instance in range(self._spec.instances):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        request = self._requests[instance]
        try:
            request.infer({name: _to_tensor(array) for name, array in inputs.items()}, share_inputs=True)
            # A copy, because the request's next run overwrites its memory.
            return [_from_tensor(request.get_tensor(name)) for name in outputs or self._outputs]
        except RuntimeError as error:
            message = _last_line(error)
            if "incompatible" in message or "shape" in message.lower():
                raise InvalidTensor(f"the model rejects this input: {message}") from error
            raise EngineFailed(f"OpenVINO failed: {message}") from error

    def close(self) -> None:
        self._requests.clear()

    def _choose_precision(self, core: Any) -> str:
        has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if self._spec.precision == "bf16" and not has_bf16:
            raise ConfigError(
                "precision bf16 needs a processor with AVX-512 BF16 or AMX; use precision: auto",
                reason="unsupported_precision",
            )
        return "bf16" if has_bf16 and self._spec.precision in ("auto", "bf16") else "fp32"

    def _to_spec(self, port: Any) -> TensorSpec:
        datatype = _TYPES.get(port.get_element_type())
        if datatype is None:
            raise ConfigError(
                f"{self._spec.file}: '{port.any_name}' has a type that this engine does not support; use engine: onnx"
            )
        shape = tuple(d.get_length() if d.is_static else -1 for d in port.get_partial_shape())
        return TensorSpec(port.any_name, datatype, shape)


def _measure_precision(compiled: Any) -> str:
    """Return the precision in which most costly operations run; it may differ from the requested and the file's."""
    facts = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    costly = [fact["runtimePrecision"].astype(str) for fact in facts if fact["layerType"].astype(str) in _COSTLY_OPS]
    found = Counter(_PRECISIONS.get(name, name) for name in costly)
    return max(found, key=found.__getitem__) if found else ""


def _to_tensor(array: Array) -> Any:
    if array.dtype == _BF16:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ov.Tensor(bits, array.shape, ov.Type.bf16)
    # Only writable memory can be shared, and received tensors are read-only.
    return ov.Tensor(np.ascontiguousarray(array), shared_memory=array.flags.writeable)


def _from_tensor(tensor: Any) -> Array:
    if tensor.element_type == ov.Type.bf16:
        return np.array(tensor.data, copy=True).view(_BF16).reshape(tuple(tensor.shape))
    copied: Array = np.array(tensor.data, copy=True)
    return copied


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
