"""Runs an opened PyTorch model: in each instance's thread, with its thread count, on its own CUDA stream."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError, EngineFailed, InvalidTensor, PenstockError
from penstock.core.tensors import NUMPY_TYPES, Array
from penstock.engines.torch.arrays import check_input, to_array, to_tensor
from penstock.engines.torch.devices import Target
from penstock.engines.torch.model import TORCH_TYPES, TorchModel, pick

_PROBE_SIZE = 2  # stands in for an open dimension; a compiler takes 0 and 1 for fixed
_ADVICE = "lower batching.max_rows or batching.max_tokens, or send less at a time"
# How PyTorch words what is wrong with an input, for which it has no type of error. Datatypes are checked beforehand.
_DATATYPE = re.compile(r"dtype|scalar type|data type", re.IGNORECASE)
_INPUT_FAULT = re.compile(r"shape|size|dimension|out of range|Guard failed|channels", re.IGNORECASE)


class TorchRunner:
    def __init__(self, model: TorchModel, target: Target, threads: int) -> None:
        self._model = model
        self._target = target
        self._device = target.device
        self._threads = threads
        self._streams: dict[int, Any] = {}  # by instance
        self._dtypes = {spec.name: TORCH_TYPES[spec.datatype] for spec in model.outputs}
        self._is_converted = model.autocast is not None
        # TF32 has FP16's mantissa, and would run what says fp32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if target.kind == "cuda":
            torch.cuda.synchronize(self._device)  # the weights are there before another stream reads them

    def compile(self, file: Path) -> None:
        """Compiles the module and runs it once, as it is compiled only then; raises ConfigError where that fails."""
        if not self._model.may_compile:
            raise ConfigError(f"{file}: torch.compile cannot compile a TorchScript file; take torch.compile out")
        probe = {
            spec.name: np.zeros([_PROBE_SIZE if size < 0 else size for size in spec.shape], NUMPY_TYPES[spec.datatype])
            for spec in self._model.inputs
        }
        self._model.module.compile(dynamic=True)
        try:
            self.run(0, probe, [])
        except PenstockError as error:
            raise ConfigError(f"{file}: torch.compile fails: {error.message}; take torch.compile out") from error

    def run(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self._check(inputs)
        # OpenMP keeps the number by calling thread, and each instance has a thread.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode(), self._precision(), self._stream(instance):
                tensors = [to_tensor(inputs[spec.name], self._device) for spec in self._model.inputs]
                found = pick(self._model.call(tensors), self._model.outputs)
                arrays = {
                    spec.name: to_array(spec, tensor, self._dtypes[spec.name], self._is_converted)
                    for spec, tensor in zip(self._model.outputs, found, strict=True)
                    if not outputs or spec.name in outputs
                }
        except PenstockError:
            raise
        except Exception as error:
            raise self._explain(error) from error
        return [arrays[name] for name in outputs] if outputs else list(arrays.values())

    def close(self) -> None:
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
            if limit.tokens and ids.shape[-1] > limit.tokens:
                raise InvalidTensor(
                    f"input '{limit.name}' has {ids.shape[-1]} tokens in a row; the model takes at most {limit.tokens}"
                )
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit.below:
                raise InvalidTensor(f"input '{limit.name}' has an id that is not from 0 to {limit.below - 1}")

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
            self._streams[instance] = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[instance]):
            yield

    def _explain(self, error: Exception) -> PenstockError:
        text = brief(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text:
            self._free()
            return EngineFailed(f"{self._target.name} is out of memory: {_ADVICE}")
        if "CUDA error" in text:
            return EngineFailed(f"PyTorch failed: {text}; after an error of CUDA only a new worker can go on")
        if "same device" in text:
            return EngineFailed(f"PyTorch failed: {text}; the file fixes a device: save it on {self._target.kind}")
        if _DATATYPE.search(text):
            advice = "use precision: fp32" if self._is_converted else "are the datatypes in torch.inputs right?"
            return EngineFailed(f"PyTorch failed: {text}; {advice}")
        is_input_fault = isinstance(error, RuntimeError | IndexError | AssertionError | ValueError)
        if is_input_fault and _INPUT_FAULT.search(text):
            return InvalidTensor(f"the model refuses this input: {text}")
        return EngineFailed(f"PyTorch failed: {text}")


def brief(error: Exception) -> str:
    """What an error says, without where in PyTorch or in a TorchScript file it comes from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = lines[-1:] if "TorchScript" in lines[0] else lines[: 2 if lines[0].endswith(":") else 1]
    return re.sub(r"^(RuntimeError|IndexError): ", "", " ".join(told))[:300]
