"""An opened PyTorch file: its inputs and outputs, and the function that runs it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError, EngineFailed
from penstock.core.tensors import NUMPY_TYPES, TensorSpec
from penstock.engines.torch.torch_devices import DTYPES, Target

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
TORCH_TYPES = {datatype: getattr(torch, dtype.name) for datatype, dtype in NUMPY_TYPES.items()}
DATATYPES = {dtype: datatype for datatype, dtype in TORCH_TYPES.items()}
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.float64: "fp64", torch.bfloat16: "bf16"}

Forward = Callable[[Sequence[Any]], Any]  # tensors in the order of the inputs; returns the module's own result


@dataclass(frozen=True, slots=True)
class IdLimit:
    """Limits of an input of ids. A larger id would read out of bounds, after which CUDA fails in the whole process."""

    name: str
    upper_bound: int  # exclusive upper bound of an id
    tokens: int = 0  # limit of a row; 0: no limit


@dataclass(frozen=True, slots=True)
class TorchModel:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str  # in which the model runs
    module: Any  # the module that `forward` calls
    forward: Forward
    may_compile: bool = True
    autocast: Any = None  # dtype of autocast, or None
    limits: tuple[IdLimit, ...] = ()


def iterate_tensors(result: Any) -> Iterator[tuple[str, Any]]:
    """Yield each tensor in a module's result, in order, with its name (or an empty text)."""
    if isinstance(result, Mapping):
        for name, value in result.items():
            yield from ((str(name) if not inner else f"{name}_{inner}", leaf) for inner, leaf in iterate_tensors(value))
    elif isinstance(result, list | tuple):
        names = getattr(result, "_fields", None) or ([""] if len(result) == 1 else map(str, range(len(result))))
        for name, value in zip(names, result, strict=True):
            yield from (("_".join(filter(None, (name, inner))), leaf) for inner, leaf in iterate_tensors(value))
    elif result is not None:
        yield "", result


def select_outputs(result: Any, wanted: Sequence[TensorSpec]) -> list[Any]:
    """Return a module's result as tensors in the order of `wanted`: by name if the names match, else by position."""
    if isinstance(result, torch.Tensor) and len(wanted) == 1:
        return [result]
    found = list(iterate_tensors(result))
    named = dict(found)
    if len(named) == len(found) and all(spec.name in named for spec in wanted):
        return [named[spec.name] for spec in wanted]
    is_ambiguous = isinstance(result, Mapping) and any(spec.name in named for spec in wanted)
    if len(found) != len(wanted) or is_ambiguous:
        gave = ", ".join(name or "a tensor" for name, _ in found) or "nothing"
        names = ", ".join(spec.name for spec in wanted)
        raise EngineFailed(f"the model returned {len(found)} outputs ({gave}), but torch.outputs has {names}")
    return [leaf for _, leaf in found]


def main_precision(tensors: Sequence[Any]) -> str:
    """Return the precision of most weights, or fp32 if there are none."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if (name := PRECISIONS.get(tensor.dtype)) is not None:
            counts[name] = counts.get(name, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__) if counts else "fp32"


def choose_precision(file: Path, weights: Sequence[Any], target: Target) -> tuple[str, Any]:
    """Return the precision in which the model runs, and the dtype for autocast (None: run without autocast).

    The file's weights are not converted instead, because its code may contain casts.
    """
    precision = main_precision(weights)
    if target.precision in ("auto", precision):
        return precision, None
    if precision != "fp32":
        raise ConfigError(
            f"{file}: its weights are in {precision}, so it cannot run in {target.precision}; use precision: auto",
            file=str(file),
        )
    return target.precision, DTYPES[target.precision]


def brief_message(error: Exception) -> str:
    """Return an error's text without locations in the code of PyTorch or TorchScript."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    shown = lines[-1:] if "TorchScript" in lines[0] else lines[: 2 if lines[0].endswith(":") else 1]
    return re.sub(r"^(RuntimeError|IndexError): ", "", " ".join(shown))[:300]
