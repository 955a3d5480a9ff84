"""ONNX Runtime on the CPU."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.signature import Signature
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec
from penstock.engines.base import EngineSpec

_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}
_ONNX_BFLOAT16 = 16
_BF16 = NUMPY_TYPES["BF16"]


class OnnxEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._sessions: list[Any] = []
        self._has_bf16 = False

    def load(self) -> Signature:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._spec.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take the cores from the other instances.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # A session of one thread runs in its caller's, so all instances share it and its weights.
        sessions = 1 if self._spec.threads == 1 else self._spec.instances
        try:
            self._sessions = [
                ort.InferenceSession(str(self._spec.file), options, providers=["CPUExecutionProvider"])
                for _ in range(sessions)
            ]
        except Exception as error:
            raise ConfigError(f"{self._spec.file}: ONNX Runtime cannot load it: {_first_line(error)}") from error
        session = self._sessions[0]
        inputs = tuple(_spec(value, self._spec.file) for value in session.get_inputs())
        outputs = tuple(_spec(value, self._spec.file) for value in session.get_outputs())
        self._has_bf16 = any(value.datatype == "BF16" for value in (*inputs, *outputs))
        return Signature(inputs, outputs, "onnxruntime_onnx", "fp32")

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        for instance in range(len(self._sessions)):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        session = self._sessions[instance % len(self._sessions)]
        inputs = _with_text(inputs)
        try:
            if self._has_bf16:
                return _infer_values(session, inputs, outputs)
            found: list[Array] = session.run(outputs or None, inputs)
            return found
        except ort.capi.onnxruntime_pybind11_state.InvalidArgument as error:
            raise InvalidTensor(f"the model refuses this input: {_first_line(error)}") from error
        except Exception as error:
            raise EngineFailed(f"ONNX Runtime failed: {_first_line(error)}") from error

    def close(self) -> None:
        self._sessions.clear()


def _infer_values(session: Any, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
    """NumPy has no bfloat16 that ONNX Runtime knows: it goes in and out as its 16 bits."""
    names = list(outputs) or [value.name for value in session.get_outputs()]
    bits = [value.type == "tensor(bfloat16)" for value in session.get_outputs() if value.name in names]
    values = {name: _to_value(array) for name, array in inputs.items()}
    found = session.run_with_ort_values(names, values)
    return [_from_value(value, is_bf16) for value, is_bf16 in zip(found, bits, strict=True)]


def _to_value(array: Array) -> Any:
    if array.dtype == _BF16:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _from_value(value: Any, is_bf16: bool) -> Array:
    if not is_bf16:
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    if 0 in shape:
        return np.empty(shape, _BF16)
    # No numpy() for bfloat16: copy its memory from where it lies.
    count = int(np.prod(shape)) if shape else 1
    raw = ctypes.string_at(value.data_ptr(), count * 2)
    return np.frombuffer(raw, _BF16).reshape(shape)


def _with_text(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    if not any(array.dtype == object for array in inputs.values()):
        return inputs
    return {name: _decode(name, array) if array.dtype == object else array for name, array in inputs.items()}


def _decode(name: str, array: Array) -> Array:
    decoded = np.empty(array.size, dtype=object)
    try:
        decoded[:] = [item.decode() if isinstance(item, bytes) else item for item in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidTensor(f"input '{name}' has an element that is not UTF-8") from error
    return decoded.reshape(array.shape)


def _spec(value: Any, file: Path) -> TensorSpec:
    datatype = _TYPES.get(value.type)
    if datatype is None:
        raise ConfigError(f"{file}: '{value.name}' is a {value.type}; only dense tensors are served")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return TensorSpec(value.name, datatype, shape)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
