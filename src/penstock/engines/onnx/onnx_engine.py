"""Runs ONNX files with ONNX Runtime on the CPU, an NVIDIA GPU or an Apple GPU."""

import contextlib
import ctypes
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import structlog

from penstock.core.error_text import get_first_line
from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.signature import GPU_ROWS, Signature, TokenRows
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, TensorSpec
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.inputs import checked_input
from penstock.engines.onnx.onnx_network import has_row_inputs, read_precision
from penstock.engines.onnx.onnx_variants import weight_files
from penstock.engines.out_of_memory import as_out_of_memory

_TYPES = {
    **{f"tensor({dtype.name})": datatype for datatype, dtype in NUMPY_TYPES.items()},
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_ONNX_BFLOAT16 = 16
_BF16 = NUMPY_TYPES["BF16"]
CPU = "CPUExecutionProvider"
PROVIDERS = {"cuda": "CUDAExecutionProvider", "mps": "CoreMLExecutionProvider", "cpu": CPU}
# The CPU's fused kernel of Add and LayerNormalization takes several times as long as separate kernels, which is a fifth
# of a text encoder's time in INT8.
_SLOWER_ON_CPU = ["SkipLayerNormFusion"]
MAX_COPIED_BYTES = 1024**3  # limit for all copies of the weights; above it, instances share one copy
_ADVICE = {
    # Both packages contain the same files, so the package that is installed last is used.
    "cuda": "it needs an NVIDIA GPU with its driver, and the package onnxruntime-gpu, installed after onnxruntime: "
    "pip install 'penstock-serve[cuda]'; pip install --force-reinstall --no-deps onnxruntime-gpu",
    "mps": "it needs an Apple GPU and ONNX Runtime's package for macOS: pip install onnxruntime",
}
log = structlog.get_logger()
MAX_INPUT_BUFFERS = 64  # number of input shapes whose memory is kept


class DeviceBinding:
    """Runs one instance on a GPU with input buffers of its own. One thread at a time may use this object."""

    def __init__(self, session: Any, device: str, index: int) -> None:
        self._session = session
        self._device = device  # as ONNX Runtime names it: cuda, cpu
        self._index = index
        self._get_binding = session.io_binding()
        self._outputs = [value.name for value in session.get_outputs()]
        self._input_buffers: OrderedDict[tuple[str, tuple[int, ...], str], Any] = OrderedDict()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        binding = self._get_binding
        binding.clear_binding_inputs()
        binding.clear_binding_outputs()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, self._copy_to_device(name, array))
        for name in outputs or self._outputs:
            binding.bind_output(name, self._device, self._index)
        self._session.run_with_iobinding(binding)
        found: list[Array] = binding.copy_outputs_to_cpu()
        return found

    def _copy_to_device(self, name: str, array: Array) -> Any:
        """Copy the array to the device; reuse the memory of an earlier array of the same name, shape and type."""
        key = (name, array.shape, array.dtype.str)
        value = self._input_buffers.pop(key, None)
        if value is None:
            shape = list(array.shape)
            value = ort.OrtValue.ortvalue_from_shape_and_type(shape, array.dtype.type, self._device, self._index)
        value.update_inplace(np.ascontiguousarray(array))
        self._input_buffers[key] = value
        if len(self._input_buffers) > MAX_INPUT_BUFFERS:
            self._input_buffers.popitem(last=False)
        return value


class OnnxEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._sessions: list[Any] = []
        self._has_bf16 = False
        self._gpu: int | None = (
            None  # number of the GPU to which inputs are copied, or None if inputs stay in the CPU's memory
        )
        self._inputs: tuple[TensorSpec, ...] = ()
        self._bindings: dict[int, DeviceBinding] = {}  # by instance

    def load(self) -> Signature:
        device = self._open_on_best_device()
        session = self._sessions[0]
        inputs = tuple(_to_spec(value, self._spec.file) for value in session.get_inputs())
        outputs = tuple(_to_spec(value, self._spec.file) for value in session.get_outputs())
        self._inputs = inputs
        datatypes = {value.datatype for value in (*inputs, *outputs)}
        self._has_bf16 = "BF16" in datatypes
        if device.startswith("cuda") and not datatypes & {
            "BF16",
            BYTES,
        }:  # DeviceBinding cannot copy tensors of these types to a GPU
            self._gpu = int(device.partition(":")[2] or 0)
        precision = read_precision(self._spec.file, inputs)
        rows = GPU_ROWS if device.startswith("cuda") else TokenRows()
        return Signature(inputs, outputs, "onnxruntime_onnx", precision, device, token_rows=rows)

    def _open_on_best_device(self) -> str:
        """Open the sessions on the requested device, or on the first that can run the model; return the device."""
        wanted = self._spec.device
        if wanted != "auto":
            self._sessions = self._open_on(wanted)
            return wanted
        for device in ("cuda", "mps"):
            if PROVIDERS[device] in ort.get_available_providers():
                try:
                    self._sessions = self._open_on(device)
                    return device
                except ConfigError as error:
                    log.warning("device_passed_over", device=device, reason=error.message)
        self._sessions = self._open_on("cpu")
        return "cpu"

    def _open_on(self, device: str) -> list[Any]:
        kind, _, index = device.partition(":")
        provider = PROVIDERS[kind]
        if provider not in ort.get_available_providers():
            raise ConfigError(
                f"instances.device {device}: this ONNX Runtime has no {provider}; {_ADVICE[kind]}",
                reason="device_missing",
            )
        missing = _preload_cuda() if kind == "cuda" else ""
        has_rows = kind == "cpu" and has_row_inputs(self._spec.file)
        # A session with one thread runs in its caller's thread, so instances could share a session and its weights, as
        # they do on a GPU. But weights of its own stay in the caches of the instance's core, which saves a thirtieth
        # of a text encoder's time.
        has_own = kind == "cpu" and (
            self._spec.threads > 1 or (has_rows and self._total_weight_bytes() <= MAX_COPIED_BYTES)
        )
        count = self._spec.instances if has_own else 1
        providers = [CPU] if kind == "cpu" else [(provider, _provider_options(kind, index)), CPU]
        options = _session_options(self._spec.threads)
        if has_rows and self._spec.instances > count:
            # Instances would also share the arena, so a thread would get memory from another core's cache, which costs
            # up to a tenth of a text encoder's time. Without the arena, the C library gives each thread memory of its
            # own. For images the arena stays, because the C library requests large pieces from the system every time.
            options.enable_cpu_mem_arena = False
        try:
            sessions = [
                # No fallback: otherwise, operations that fail on a GPU would run on the CPU without a warning.
                ort.InferenceSession(
                    str(self._spec.file),
                    options,
                    providers=providers,
                    enable_fallback=0,
                    disabled_optimizers=_SLOWER_ON_CPU if kind == "cpu" else None,
                )
                for _ in range(count)
            ]
        except Exception as error:
            if (lack := as_out_of_memory(error, device)) is not None:
                raise lack from error
            reason = get_first_line(error) if kind == "cpu" else _error_end(error)
            raise ConfigError(f"{self._spec.file}: ONNX Runtime cannot load it on {device}: {reason}") from error
        if provider not in sessions[0].get_providers():
            raise ConfigError(
                f"instances.device {device}: {provider} cannot be started{missing}; {_ADVICE[kind]}",
                reason="device_missing",
            )
        if kind != "cpu" and not any(
            part.ep_name == provider for part in sessions[0].get_provider_graph_assignment_info()
        ):
            raise ConfigError(
                f"{self._spec.file}: {device} can run none of its operations; use instances.device: cpu",
                reason="device_missing",
            )
        return sessions

    def _total_weight_bytes(self) -> int:
        """Return the total size of the weights if each instance has its own copy."""
        return self._spec.instances * sum(file.stat().st_size for file in weight_files(self._spec.file))

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        for instance in range(len(self._sessions)):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        session = self._sessions[instance % len(self._sessions)]
        inputs = _decode_texts(inputs)
        try:
            if self._has_bf16:
                return _infer_values(session, inputs, outputs)
            if self._gpu is not None and all(array.size for array in inputs.values()):
                # ONNX Runtime does not check bound inputs, and a wrong input would look like a failure of the model.
                checked = {spec.name: checked_input(spec, inputs) for spec in self._inputs}
                return self._get_binding(instance, self._gpu).run(checked, outputs)
            found: list[Array] = session.run(outputs or None, inputs)
            return found
        except InvalidTensor:
            raise
        except ort.capi.onnxruntime_pybind11_state.InvalidArgument as error:
            raise InvalidTensor(f"the model rejects this input: {get_first_line(error)}") from error
        except Exception as error:
            if (lack := as_out_of_memory(error, self._spec.device)) is not None:
                raise lack from error
            raise EngineFailed(f"ONNX Runtime failed: {get_first_line(error)}") from error

    def _get_binding(self, instance: int, index: int) -> DeviceBinding:
        binding = self._bindings.get(instance)
        if binding is None:
            binding = self._bindings[instance] = DeviceBinding(self._sessions[0], "cuda", index)
        return binding

    def close(self) -> None:
        self._bindings.clear()
        self._sessions.clear()


def _session_options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads would take the cores from the other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


def _provider_options(device_kind: str, index: str) -> dict[str, str]:
    if device_kind == "mps":
        return {"ModelFormat": "MLProgram", "MLComputeUnits": "CPUAndGPU"}
    # TF32 has only FP16's mantissa, so a file in fp32 must not use it. The heuristic search avoids trying all of
    # cuDNN's algorithms for each new shape.
    return {"device_id": index or "0", "use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def _preload_cuda() -> str:
    """Load CUDA's libraries from pip's folders; return the message about a missing library, or an empty text."""
    ort.set_default_logger_severity(3)  # otherwise it warns in each session that CUDA is not a plug-in
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        ort.preload_dlls()
    first = next((line for line in output.getvalue().splitlines() if line.startswith("Failed")), "")
    return f" ({first})" if first else ""


def _infer_values(session: Any, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
    """Run the model, passing bfloat16 tensors as 16-bit integers, because ONNX Runtime has no NumPy type for them."""
    names = list(outputs) or [value.name for value in session.get_outputs()]
    bits = [value.type == "tensor(bfloat16)" for value in session.get_outputs() if value.name in names]
    values = {name: _to_ort_value(array) for name, array in inputs.items()}
    found = session.run_with_ort_values(names, values)
    return [_from_ort_value(value, is_bf16) for value, is_bf16 in zip(found, bits, strict=True)]


def _to_ort_value(array: Array) -> Any:
    if array.dtype == _BF16:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _from_ort_value(value: Any, is_bf16: bool) -> Array:
    if not is_bf16:
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    if 0 in shape:
        return np.empty(shape, _BF16)
    # bfloat16 has no numpy(): copy the memory.
    count = int(np.prod(shape)) if shape else 1
    raw = ctypes.string_at(value.data_ptr(), count * 2)
    return np.frombuffer(raw, _BF16).reshape(shape)


def _decode_texts(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    if not any(array.dtype == object for array in inputs.values()):
        return inputs
    return {name: _decode_array(name, array) if array.dtype == object else array for name, array in inputs.items()}


def _decode_array(name: str, array: Array) -> Array:
    decoded = np.empty(array.size, dtype=object)
    try:
        decoded[:] = [item.decode() if isinstance(item, bytes) else item for item in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidTensor(f"input '{name}' has an element that is not UTF-8") from error
    return decoded.reshape(array.shape)


def _to_spec(value: Any, file: Path) -> TensorSpec:
    datatype = _TYPES.get(value.type)
    if datatype is None:
        raise ConfigError(
            f"{file}: '{value.name}' is a {value.type}; only dense tensors are supported", reason="no_tensor"
        )
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return TensorSpec(value.name, datatype, shape)


def _error_end(error: Exception) -> str:
    """Return the end of an error text: errors of CUDA and Core ML begin with C++ code and end with the reason."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"…{text[-199:]}"
