"""Runs PyTorch models on the CPU, an NVIDIA GPU or an Apple GPU."""

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor, PenstockError
from penstock.core.signature import GPU_ROWS, Signature, TokenRows
from penstock.core.tensors import NUMPY_TYPES, Array, TensorSpec, is_shape_accepted
from penstock.engines.availability import TORCH_FOLDERS, require_package
from penstock.engines.engine_options import TorchOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.out_of_memory import as_out_of_memory
from penstock.engines.torch.graphs import TokenGraphs, copy_to_device
from penstock.engines.torch.pixel_network import choose_tile, convert_to_pixels, takes_planes
from penstock.engines.torch.shape_buckets import LENGTH_STEP, ShapeBuckets
from penstock.engines.torch.torch_devices import Target, choose_target
from penstock.engines.torch.torch_files import open_file
from penstock.engines.torch.torch_model import IDS, TORCH_TYPES, TYPES, TorchModel, brief_message, select_outputs

PLATFORM = "pytorch_libtorch"
UNLOADED = TorchModel((), (), "", None, lambda tensors: tensors)
MAX_INT32 = 2**31 - 1
_PROBE_SIZE = 2  # used for open sizes, because a compiler treats 0 and 1 as fixed sizes
# Texts of PyTorch's errors about a wrong input, which have no type of their own. Datatypes are checked beforehand.
_DATATYPE = re.compile(r"dtype|scalar type|data type", re.IGNORECASE)
_INPUT_FAULT = re.compile(r"shape|size|dimension|out of range|Guard failed|channels", re.IGNORECASE)
_BF16 = NUMPY_TYPES["BF16"]


class _WritableArray:
    """Presents read-only memory as writable, because PyTorch would otherwise warn that its tensors are writable."""

    def __init__(self, array: Array) -> None:
        self._array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def check_input(spec: TensorSpec, array: Array) -> None:
    if array.dtype != NUMPY_TYPES[spec.datatype]:
        raise InvalidTensor(f"input '{spec.name}' has dtype {array.dtype}; the model takes {spec.datatype}")
    if not is_shape_accepted(array.shape, spec.shape):
        raise InvalidTensor(f"input '{spec.name}' has shape {list(array.shape)}; the model takes {list(spec.shape)}")


def to_tensor(array: Array, device: Any) -> Any:
    """Convert an array to a tensor; on the CPU, copy read-only arrays, because a model may write to its inputs."""
    if array.dtype == _BF16:
        return to_tensor(array.view(np.int16), device).view(torch.bfloat16)
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if array.flags.writeable:
        return torch.from_numpy(array).to(device)
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(np.asarray(_WritableArray(array))).to(device)


def to_array(spec: TensorSpec, result: Any, dtype: Any, is_converted: bool) -> Array:
    """Convert an output to an array.

    `is_converted`: the model runs in a different precision than its file has, so convert floats back to `dtype`.
    """
    if not isinstance(result, torch.Tensor):
        raise EngineFailed(f"output '{spec.name}' of the model is a {type(result).__name__}, not a tensor")
    if result.dtype != dtype and is_converted and result.is_floating_point() and dtype.is_floating_point:
        result = result.to(dtype)
    if result.dtype != dtype:
        raise EngineFailed(
            f"output '{spec.name}' of the model is {result.dtype}, but torch.outputs says {spec.datatype}: correct it"
        )
    if not is_shape_accepted(result.shape, spec.shape):
        raise EngineFailed(
            f"output '{spec.name}' of the model has shape {list(result.shape)}, "
            f"but torch.outputs says {list(spec.shape)}: correct it"
        )
    if result.layout is not torch.strided:
        result = result.to_dense()
    result = result.detach().cpu().resolve_neg()
    if dtype is torch.bfloat16:
        bits: Array = result.contiguous().view(torch.int16).numpy()
        return bits.view(_BF16)
    array: Array = result.numpy()
    return array


class TorchEngine:
    """Runs a PyTorch model. Instances share the module and its weights; on CUDA, each has a stream of its own."""

    def __init__(self, spec: EngineSpec, options: TorchOptions) -> None:
        if spec.file.name in TORCH_FOLDERS:  # imported now, so that the package's memory is not counted as the model's
            require_package(TORCH_FOLDERS[spec.file.name])
        self._spec = spec
        self._options = options
        self._target = Target("cpu", "auto")
        self._model = UNLOADED
        self._streams: dict[int, Any] = {}  # by instance
        self._graphs: TokenGraphs | None = None

    def load(self) -> Signature:
        self._target = target = choose_target(self._spec.device, self._spec.precision)
        self._model = model = open_file(self._spec.file, self._options, target)
        tile = 0
        if self._spec.image is not None and target.device_kind == "cuda" and takes_planes(model):
            self._model = model = convert_to_pixels(model, self._spec.image, target.device)
            tile = choose_tile(target.device)
        # TF32 has only FP16's mantissa, so it must not replace fp32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if target.device_kind == "cuda":
            torch.cuda.synchronize(target.device)  # wait for the weights before another stream reads them
        if self._options.compile:
            self._compile_module()
        rows = self._choose_token_rows()
        return Signature(
            model.inputs, model.outputs, PLATFORM, model.precision, target.name, token_rows=rows, tile=tile
        )

    def _choose_token_rows(self) -> TokenRows:
        """Return the layout of token rows: on CUDA, a model from a folder takes ids without mask or padding."""
        if self._target.device_kind != "cuda":
            return TokenRows()
        if not self._model.limits:
            return GPU_ROWS
        below = {limit.name: min(limit.upper_bound, MAX_INT32) for limit in self._model.limits}
        return TokenRows(LENGTH_STEP, is_marked=True, vocabulary=below[IDS], types=below.get(TYPES, 0))

    def prepare_rows(self, max_rows: int, max_length: int, max_tokens: int | None) -> None:
        is_wanted = self._options.graphs and not self._options.compile
        if self._target.device_kind != "cuda" or not self._model.limits or not is_wanted:
            return
        positions = self._model.limits[0].tokens  # a longer row would read beyond the table's bounds
        self._graphs = TokenGraphs(self._model, self._target.device)
        self._graphs.capture(ShapeBuckets(max_rows, min(max_length, positions or max_length), max_tokens))

    def _compile_module(self) -> None:
        """Compile the module by running it once; raise ConfigError if that fails."""
        file = self._spec.file
        if not self._model.may_compile:
            raise ConfigError(f"{file}: torch.compile cannot compile a TorchScript file; remove torch.compile")
        probe = {
            spec.name: np.zeros([_PROBE_SIZE if size < 0 else size for size in spec.shape], NUMPY_TYPES[spec.datatype])
            for spec in self._model.inputs
        }
        self._model.module.compile(dynamic=True)
        try:
            self.infer(0, probe, [])
        except PenstockError as error:
            raise ConfigError(f"{file}: torch.compile fails: {error.message}; remove torch.compile") from error

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        # All instances share the graphs.
        for instance in range(self._spec.instances if self._graphs is None else 1):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        assert self._model is not UNLOADED, "load the model first"
        if IDS in inputs and inputs[IDS].dtype == np.int32:
            return [self._infer_rows(instance, inputs)]
        self._check_inputs(inputs)
        # OpenMP keeps this number per calling thread, and each instance has a thread.
        if torch.get_num_threads() != self._spec.threads:
            torch.set_num_threads(self._spec.threads)
        try:
            with torch.inference_mode(), self._open_autocast(), self._use_stream(instance):
                tensors = [to_tensor(inputs[spec.name], self._target.device) for spec in self._model.inputs]
                found = select_outputs(self._model.forward(tensors), self._model.outputs)
                arrays = {
                    spec.name: to_array(spec, tensor, TORCH_TYPES[spec.datatype], self._model.autocast is not None)
                    for spec, tensor in zip(self._model.outputs, found, strict=True)
                    if not outputs or spec.name in outputs
                }
        except PenstockError:
            raise
        except Exception as error:
            raise self._to_error(error) from error
        return [arrays[name] for name in outputs] if outputs else list(arrays.values())

    def _infer_rows(self, instance: int, inputs: Mapping[str, Array]) -> Array:
        """Run rows of token ids, and of token types for pairs; the task has checked both. A negative id is padding."""
        given = [inputs[name] for name in (IDS, TYPES) if name in inputs]
        self._check_length(IDS, given[0])
        try:
            found = self._graphs.run(given) if self._graphs is not None else None
            if found is None:
                with torch.inference_mode(), self._use_stream(instance):
                    answer = self._model.forward(copy_to_device(given, len(self._model.inputs), self._target.device))
                    (spec,) = self._model.outputs
                    found = to_array(spec, answer, TORCH_TYPES[spec.datatype], is_converted=False)
        except PenstockError:
            raise
        except Exception as error:
            raise self._to_error(error) from error
        return found

    def close(self) -> None:
        self._graphs = None
        self._model = UNLOADED
        self._streams.clear()
        self._free_cached_memory()

    def _free_cached_memory(self) -> None:
        if self._target.device_kind == "cuda":
            with contextlib.suppress(RuntimeError):  # if CUDA has failed
                torch.cuda.empty_cache()

    def _check_inputs(self, inputs: Mapping[str, Array]) -> None:
        for spec in self._model.inputs:
            if spec.name not in inputs:
                raise InvalidTensor(f"missing input '{spec.name}'")
            check_input(spec, inputs[spec.name])
        if self._model.limits and len(shapes := {inputs[spec.name].shape for spec in self._model.inputs}) > 1:
            raise InvalidTensor(f"the inputs have different shapes: {', '.join(map(str, sorted(shapes)))}")
        for limit in self._model.limits:
            ids = inputs[limit.name]
            self._check_length(limit.name, ids)
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit.upper_bound:
                raise InvalidTensor(f"input '{limit.name}' has an id that is not from 0 to {limit.upper_bound - 1}")

    def _check_length(self, name: str, ids: Array) -> None:
        most = next((limit.tokens for limit in self._model.limits if limit.name == name), 0)
        if most and ids.shape[-1] > most:
            raise InvalidTensor(f"input '{name}' has {ids.shape[-1]} tokens in a row; the model takes at most {most}")

    def _open_autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._model.autocast is None:
            return contextlib.nullcontext()
        # Without a cache, which would keep converted weights after the call.
        autocast: contextlib.AbstractContextManager[Any] = torch.autocast(
            self._target.device_kind, self._model.autocast, cache_enabled=False
        )
        return autocast

    @contextlib.contextmanager
    def _use_stream(self, instance: int) -> Iterator[None]:
        """Run the body of the `with` statement on the instance's CUDA stream, so that instances run in parallel."""
        if self._target.device_kind != "cuda":
            yield
            return
        if instance not in self._streams:
            self._streams[instance] = torch.cuda.Stream(self._target.device)
        with torch.cuda.device(self._target.device), torch.cuda.stream(self._streams[instance]):
            yield

    def _to_error(self, error: Exception) -> PenstockError:
        text = brief_message(error)
        if (lack := as_out_of_memory(error, self._target.name)) is not None:
            traceback.clear_frames(error.__traceback__)  # they hold the memory of the failed run
            self._free_cached_memory()
            return lack
        if "CUDA error" in text:
            return EngineFailed(f"PyTorch failed: {text}; restart the worker: CUDA cannot recover")
        if "same device" in text:
            return EngineFailed(
                f"PyTorch failed: {text}; the file runs only where it was saved: save it on {self._target.device_kind}"
            )
        if _DATATYPE.search(text):
            advice = (
                "use precision: fp32" if self._model.autocast is not None else "check the datatypes in torch.inputs"
            )
            return EngineFailed(f"PyTorch failed: {text}; {advice}")
        is_input_fault = isinstance(error, RuntimeError | IndexError | AssertionError | ValueError)
        if is_input_fault and _INPUT_FAULT.search(text):
            return InvalidTensor(f"the model rejects this input: {text}")
        return EngineFailed(f"PyTorch failed: {text}")
