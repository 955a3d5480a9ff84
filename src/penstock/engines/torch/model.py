"""An opened PyTorch file: what it takes, what it gives, and how it is called."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError, EngineFailed
from penstock.core.tensors import NUMPY_TYPES, TensorSpec
from penstock.engines.torch.devices import DTYPES, Target

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
TORCH_TYPES = {datatype: getattr(torch, dtype.name) for datatype, dtype in NUMPY_TYPES.items()}
DATATYPES = {dtype: datatype for datatype, dtype in TORCH_TYPES.items()}
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.float64: "fp64", torch.bfloat16: "bf16"}

Call = Callable[[Sequence[Any]], Any]  # tensors in the order of the inputs; gives whatever the module gives


@dataclass(frozen=True, slots=True)
class IdLimit:
    """What lies beyond would be read out of a table's bounds, which on CUDA ends the whole process's work there."""

    name: str
    below: int  # every id
    tokens: int = 0  # in a row; 0: any number


@dataclass(frozen=True, slots=True)
class TorchModel:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str  # what really runs
    module: Any  # that `call` calls
    call: Call
    may_compile: bool = True
    autocast: Any = None  # the dtype; None: the module runs as it is
    limits: tuple[IdLimit, ...] = ()


def leaves(given: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in what a module gave, by name where it has one, in its order."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            yield from ((str(name) if not inner else f"{name}_{inner}", leaf) for inner, leaf in leaves(value))
    elif isinstance(given, list | tuple):
        names = getattr(given, "_fields", None) or ([""] if len(given) == 1 else map(str, range(len(given))))
        for name, value in zip(names, given, strict=True):
            yield from (("_".join(filter(None, (name, inner))), leaf) for inner, leaf in leaves(value))
    elif given is not None:
        yield "", given


def pick(given: Any, wanted: Sequence[TensorSpec]) -> list[Any]:
    """What the module gave, in the order of its outputs: by name where the names are its own, else by place."""
    if isinstance(given, torch.Tensor) and len(wanted) == 1:
        return [given]
    found = list(leaves(given))
    named = dict(found)
    if len(named) == len(found) and all(spec.name in named for spec in wanted):
        return [named[spec.name] for spec in wanted]
    is_ambiguous = isinstance(given, Mapping) and any(spec.name in named for spec in wanted)
    if len(found) != len(wanted) or is_ambiguous:
        gave = ", ".join(name or "a tensor" for name, _ in found) or "nothing"
        names = ", ".join(spec.name for spec in wanted)
        raise EngineFailed(f"the model gave {len(found)} outputs ({gave}), but torch.outputs has {names}")
    return [leaf for _, leaf in found]


def main_precision(tensors: Sequence[Any]) -> str:
    """What most of the weights are in; fp32 where there are none."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if (name := PRECISIONS.get(tensor.dtype)) is not None:
            counts[name] = counts.get(name, 0) + tensor.numel()
    return max(counts, key=counts.__getitem__) if counts else "fp32"


def choose_precision(file: Path, weights: Sequence[Any], target: Target) -> tuple[str, Any]:
    """What a file is run in, and the dtype of its autocast; None: as it is. Such a file's casts are its own,
    so it is not converted as a whole."""
    precision = main_precision(weights)
    if target.precision in ("auto", precision):
        return precision, None
    if precision != "fp32":
        raise ConfigError(
            f"{file}: its weights are in {precision}, and it is not run in {target.precision}; use precision: auto",
            file=str(file),
        )
    return target.precision, DTYPES[target.precision]


def brief(error: Exception) -> str:
    """What an error says, without where in PyTorch or in a TorchScript file it comes from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = lines[-1:] if "TorchScript" in lines[0] else lines[: 2 if lines[0].endswith(":") else 1]
    return re.sub(r"^(RuntimeError|IndexError): ", "", " ".join(told))[:300]
