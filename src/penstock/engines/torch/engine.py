"""PyTorch on the CPU, on an NVIDIA GPU or on an Apple GPU: in each instance's thread, on its own CUDA stream."""

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor, PenstockError
from penstock.core.signature import GPU_ROWS, Signature, TokenRows
from penstock.core.tensors import NUMPY_TYPES, Array
from penstock.engines.availability import TORCH_FOLDERS, require
from penstock.engines.base import EngineSpec
from penstock.engines.options import TorchOptions
from penstock.engines.out_of_memory import out_of_memory
from penstock.engines.torch.arrays import check_input, to_array, to_tensor
from penstock.engines.torch.buckets import LENGTH_STEP, ShapeBuckets
from penstock.engines.torch.devices import Target, choose
from penstock.engines.torch.files import open_file
from penstock.engines.torch.graphs import TokenGraphs, on_device
from penstock.engines.torch.model import IDS, TORCH_TYPES, TYPES, TorchModel, brief, pick
from penstock.engines.torch.pixels import choose_tile, on_pixels, takes_planes

PLATFORM = "pytorch_libtorch"
UNLOADED = TorchModel((), (), "", None, lambda tensors: tensors)
MAX_INT32 = 2**31 - 1
_PROBE_SIZE = 2  # stands in for an open dimension; a compiler takes 0 and 1 for fixed
# How PyTorch words what is wrong with an input, for which it has no type of error. Datatypes are checked beforehand.
_DATATYPE = re.compile(r"dtype|scalar type|data type", re.IGNORECASE)
_INPUT_FAULT = re.compile(r"shape|size|dimension|out of range|Guard failed|channels", re.IGNORECASE)


class TorchEngine:
    """All instances share the module and its weights."""

    def __init__(self, spec: EngineSpec, options: TorchOptions) -> None:
        if spec.file.name in TORCH_FOLDERS:  # here, so that its memory is not taken for the model's
            require(TORCH_FOLDERS[spec.file.name])
        self._spec = spec
        self._options = options
        self._target = Target("cpu", "auto")
        self._model = UNLOADED
        self._streams: dict[int, Any] = {}  # by instance
        self._graphs: TokenGraphs | None = None

    def load(self) -> Signature:
        self._target = target = choose(self._spec.device, self._spec.precision)
        self._model = model = open_file(self._spec.file, self._options, target)
        tile = 0
        if self._spec.image is not None and target.kind == "cuda" and takes_planes(model):
            self._model = model = on_pixels(model, self._spec.image, target.device)
            tile = choose_tile(target.device)
        # TF32 has FP16's mantissa, and would run what says fp32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if target.kind == "cuda":
            torch.cuda.synchronize(target.device)  # the weights are there before another stream reads them
        if self._options.compile:
            self._compile()
        rows = self._token_rows()
        return Signature(
            model.inputs, model.outputs, PLATFORM, model.precision, target.name, token_rows=rows, tile=tile
        )

    def _token_rows(self) -> TokenRows:
        """On CUDA a folder's model takes ids alone: what is padding is made there."""
        if self._target.kind != "cuda":
            return TokenRows()
        if not self._model.limits:
            return GPU_ROWS
        below = {limit.name: min(limit.below, MAX_INT32) for limit in self._model.limits}
        return TokenRows(LENGTH_STEP, is_marked=True, vocabulary=below[IDS], types=below.get(TYPES, 0))

    def prepare_rows(self, max_rows: int, max_length: int, max_tokens: int | None) -> None:
        is_wanted = self._options.graphs and not self._options.compile
        if self._target.kind != "cuda" or not self._model.limits or not is_wanted:
            return
        positions = self._model.limits[0].tokens  # beyond them a graph would read out of the table's bounds
        self._graphs = TokenGraphs(self._model, self._target.device)
        self._graphs.capture(ShapeBuckets(max_rows, min(max_length, positions or max_length), max_tokens))

    def _compile(self) -> None:
        """Compiles the module and runs it once, as it is compiled only then; raises ConfigError where that fails."""
        file = self._spec.file
        if not self._model.may_compile:
            raise ConfigError(f"{file}: torch.compile cannot compile a TorchScript file; take torch.compile out")
        probe = {
            spec.name: np.zeros([_PROBE_SIZE if size < 0 else size for size in spec.shape], NUMPY_TYPES[spec.datatype])
            for spec in self._model.inputs
        }
        self._model.module.compile(dynamic=True)
        try:
            self.infer(0, probe, [])
        except PenstockError as error:
            raise ConfigError(f"{file}: torch.compile fails: {error.message}; take torch.compile out") from error

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        # Graphs are all instances'.
        for instance in range(self._spec.instances if self._graphs is None else 1):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        assert self._model is not UNLOADED, "load the model first"
        if IDS in inputs and inputs[IDS].dtype == np.int32:
            return [self._infer_rows(instance, inputs)]
        self._check(inputs)
        # OpenMP keeps the number by calling thread, and each instance has a thread.
        if torch.get_num_threads() != self._spec.threads:
            torch.set_num_threads(self._spec.threads)
        try:
            with torch.inference_mode(), self._precision(), self._stream(instance):
                tensors = [to_tensor(inputs[spec.name], self._target.device) for spec in self._model.inputs]
                found = pick(self._model.call(tensors), self._model.outputs)
                arrays = {
                    spec.name: to_array(spec, tensor, TORCH_TYPES[spec.datatype], self._model.autocast is not None)
                    for spec, tensor in zip(self._model.outputs, found, strict=True)
                    if not outputs or spec.name in outputs
                }
        except PenstockError:
            raise
        except Exception as error:
            raise self._explain(error) from error
        return [arrays[name] for name in outputs] if outputs else list(arrays.values())

    def _infer_rows(self, instance: int, inputs: Mapping[str, Array]) -> Array:
        """Ids that a task has checked, with types where they are pairs': a negative id is padding."""
        given = [inputs[name] for name in (IDS, TYPES) if name in inputs]
        self._check_length(IDS, given[0])
        try:
            found = self._graphs.run(given) if self._graphs is not None else None
            if found is None:
                with torch.inference_mode(), self._stream(instance):
                    answer = self._model.call(on_device(given, len(self._model.inputs), self._target.device))
                    (spec,) = self._model.outputs
                    found = to_array(spec, answer, TORCH_TYPES[spec.datatype], is_converted=False)
        except PenstockError:
            raise
        except Exception as error:
            raise self._explain(error) from error
        return found

    def close(self) -> None:
        self._graphs = None
        self._model = UNLOADED
        self._streams.clear()
        self._free()

    def _free(self) -> None:
        if self._target.kind == "cuda":
            with contextlib.suppress(RuntimeError):  # of a CUDA that is lost
                torch.cuda.empty_cache()

    def _check(self, inputs: Mapping[str, Array]) -> None:
        for spec in self._model.inputs:
            if spec.name not in inputs:
                raise InvalidTensor(f"missing input '{spec.name}'")
            check_input(spec, inputs[spec.name])
        if self._model.limits and len(shapes := {inputs[spec.name].shape for spec in self._model.inputs}) > 1:
            raise InvalidTensor(f"the inputs have unlike shapes: {', '.join(map(str, sorted(shapes)))}")
        for limit in self._model.limits:
            ids = inputs[limit.name]
            self._check_length(limit.name, ids)
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit.below:
                raise InvalidTensor(f"input '{limit.name}' has an id that is not from 0 to {limit.below - 1}")

    def _check_length(self, name: str, ids: Array) -> None:
        most = next((limit.tokens for limit in self._model.limits if limit.name == name), 0)
        if most and ids.shape[-1] > most:
            raise InvalidTensor(f"input '{name}' has {ids.shape[-1]} tokens in a row; the model takes at most {most}")

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._model.autocast is None:
            return contextlib.nullcontext()
        # No cache: it would keep the weights of a call that has ended.
        autocast: contextlib.AbstractContextManager[Any] = torch.autocast(
            self._target.kind, self._model.autocast, cache_enabled=False
        )
        return autocast

    @contextlib.contextmanager
    def _stream(self, instance: int) -> Iterator[None]:
        """Instances overlap on a GPU only where each has a stream."""
        if self._target.kind != "cuda":
            yield
            return
        if instance not in self._streams:
            self._streams[instance] = torch.cuda.Stream(self._target.device)
        with torch.cuda.device(self._target.device), torch.cuda.stream(self._streams[instance]):
            yield

    def _explain(self, error: Exception) -> PenstockError:
        text = brief(error)
        if (lack := out_of_memory(error, self._target.name)) is not None:
            traceback.clear_frames(error.__traceback__)  # they hold what the failed run had in memory
            self._free()
            return lack
        if "CUDA error" in text:
            return EngineFailed(f"PyTorch failed: {text}; after an error of CUDA only a new worker can go on")
        if "same device" in text:
            return EngineFailed(f"PyTorch failed: {text}; the file fixes a device: save it on {self._target.kind}")
        if _DATATYPE.search(text):
            advice = (
                "use precision: fp32"
                if self._model.autocast is not None
                else "are the datatypes in torch.inputs right?"
            )
            return EngineFailed(f"PyTorch failed: {text}; {advice}")
        is_input_fault = isinstance(error, RuntimeError | IndexError | AssertionError | ValueError)
        if is_input_fault and _INPUT_FAULT.search(text):
            return InvalidTensor(f"the model refuses this input: {text}")
        return EngineFailed(f"PyTorch failed: {text}")
