"""ONNX Runtime on the CPU, on an NVIDIA GPU or on an Apple GPU."""

import contextlib
import ctypes
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import structlog

from penstock.core.error_text import first_line
from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor
from penstock.core.signature import GPU_ROWS, Signature, TokenRows
from penstock.core.tensors import BYTES, NUMPY_TYPES, Array, TensorSpec
from penstock.engines.base import EngineSpec
from penstock.engines.inputs import take_input
from penstock.engines.onnx.binding import DeviceBinding
from penstock.engines.onnx.network import read_precision, takes_rows
from penstock.engines.onnx.variants import weight_files
from penstock.engines.out_of_memory import out_of_memory

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
# The CPU's kernel of Add and LayerNormalization in one takes several times what both take alone: a fifth of a
# text encoder's time in INT8.
_SLOWER_ON_CPU = ["SkipLayerNormFusion"]
OWN_BYTES = 1024**3  # of weights in all; beyond it instances share them
_ADVICE = {
    # Both packages have the same files: the one that was installed last is the one that runs.
    "cuda": "it needs an NVIDIA GPU with its driver, and the package onnxruntime-gpu, installed after onnxruntime: "
    "pip install 'penstock-serve[cuda]'; pip install --force-reinstall --no-deps onnxruntime-gpu",
    "mps": "it needs an Apple GPU and ONNX Runtime's package for macOS: pip install onnxruntime",
}

log = structlog.get_logger()


class OnnxEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._sessions: list[Any] = []
        self._has_bf16 = False
        self._gpu: int | None = None  # its number; None: tensors stay where they are
        self._inputs: tuple[TensorSpec, ...] = ()
        self._bindings: dict[int, DeviceBinding] = {}  # by instance

    def load(self) -> Signature:
        device = self._open()
        session = self._sessions[0]
        inputs = tuple(_spec(value, self._spec.file) for value in session.get_inputs())
        outputs = tuple(_spec(value, self._spec.file) for value in session.get_outputs())
        self._inputs = inputs
        datatypes = {value.datatype for value in (*inputs, *outputs)}
        self._has_bf16 = "BF16" in datatypes
        if device.startswith("cuda") and not datatypes & {"BF16", BYTES}:  # no memory of a GPU's holds those here
            self._gpu = int(device.partition(":")[2] or 0)
        precision = read_precision(self._spec.file, inputs)
        rows = GPU_ROWS if device.startswith("cuda") else TokenRows()
        return Signature(inputs, outputs, "onnxruntime_onnx", precision, device, token_rows=rows)

    def _open(self) -> str:
        """Returns the device that took the model."""
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
        has_rows = kind == "cpu" and takes_rows(self._spec.file)
        # A session of one thread runs in its caller's, so instances can share it and its weights, as they do on a GPU.
        # But what each has to itself stays in its core's caches: a thirtieth of a text encoder's time.
        has_own = kind == "cpu" and (self._spec.threads > 1 or (has_rows and self._copies_bytes() <= OWN_BYTES))
        count = self._spec.instances if has_own else 1
        providers = [CPU] if kind == "cpu" else [(provider, _provider_options(kind, index)), CPU]
        options = _session_options(self._spec.threads)
        if has_rows and self._spec.instances > count:
            # The arena would be shared, too, and each thread would get what lies in the cache of another's core: up to
            # a tenth of a text encoder's time. What the C library hands out is a thread's own; but the large pieces
            # that images take come new from the system each time, which an arena spares.
            options.enable_cpu_mem_arena = False
        try:
            sessions = [
                # Without this, what fails on a GPU is run on the CPU, and nobody is told.
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
            if (lack := out_of_memory(error, device)) is not None:
                raise lack from error
            reason = first_line(error) if kind == "cpu" else _end(error)
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

    def _copies_bytes(self) -> int:
        """Of weights, where each instance has its own."""
        return self._spec.instances * sum(file.stat().st_size for file in weight_files(self._spec.file))

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        for instance in range(len(self._sessions)):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        session = self._sessions[instance % len(self._sessions)]
        inputs = _with_text(inputs)
        try:
            if self._has_bf16:
                return _infer_values(session, inputs, outputs)
            if self._gpu is not None and all(array.size for array in inputs.values()):
                # What is bound is not looked at before the run, which then fails as if the model did.
                checked = {spec.name: take_input(spec, inputs) for spec in self._inputs}
                return self._bound(instance, self._gpu).run(checked, outputs)
            found: list[Array] = session.run(outputs or None, inputs)
            return found
        except InvalidTensor:
            raise
        except ort.capi.onnxruntime_pybind11_state.InvalidArgument as error:
            raise InvalidTensor(f"the model refuses this input: {first_line(error)}") from error
        except Exception as error:
            if (lack := out_of_memory(error, self._spec.device)) is not None:
                raise lack from error
            raise EngineFailed(f"ONNX Runtime failed: {first_line(error)}") from error

    def _bound(self, instance: int, index: int) -> DeviceBinding:
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


def _provider_options(kind: str, index: str) -> dict[str, str]:
    if kind == "mps":
        return {"ModelFormat": "MLProgram", "MLComputeUnits": "CPUAndGPU"}
    # TF32 has FP16's mantissa, and would run what says fp32. The heuristic search spares each new shape a trial of
    # all of cuDNN's algorithms.
    return {"device_id": index or "0", "use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def _preload_cuda() -> str:
    """Loads CUDA's libraries where pip put them; returns what was missed, which ONNX Runtime prints."""
    ort.set_default_logger_severity(3)  # it warns of each session that CUDA is no plug-in
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ort.preload_dlls()
    first = next((line for line in said.getvalue().splitlines() if line.startswith("Failed")), "")
    return f" ({first})" if first else ""


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
        raise ConfigError(
            f"{file}: '{value.name}' is a {value.type}; only dense tensors are served", reason="no_tensor"
        )
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return TensorSpec(value.name, datatype, shape)


def _end(error: Exception) -> str:
    """What a provider says of a failed start begins with C++ and ends with the reason."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"…{text[-199:]}"
