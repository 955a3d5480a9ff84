"""TorchScript files. They tell their arguments' names, but neither datatypes nor shapes."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.manifest import DeclaredTensor
from penstock.engines.options import TorchOptions
from penstock.engines.torch.devices import Target
from penstock.engines.torch.model import TorchModel, brief, choose_precision

_MATRIX_MODULES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")


def open_script(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    module = _load(file, target)
    module.eval()
    arguments = module.forward.schema.arguments[1:]  # without the module itself
    if not (options.inputs and options.outputs):
        raise ConfigError(f"{file.name}: {_missing(arguments, options)}", file=str(file), reason="torch_inputs")
    names = _bind(file, arguments, options.inputs)
    precision, autocast = choose_precision(file, [*module.parameters(), *module.buffers()], target)
    if autocast is not None:
        _convert(module, autocast)

    def call(tensors: Sequence[Any]) -> Any:
        return module(**dict(zip(names, tensors, strict=True)))

    return TorchModel(
        tuple(tensor.spec for tensor in options.inputs),
        tuple(tensor.spec for tensor in options.outputs),
        precision,
        module,
        call,
        may_compile=False,
        autocast=autocast,
    )


def _load(file: Path, target: Target) -> Any:
    # PyTorch would have torch.export used; who has a TorchScript file knows.
    warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", DeprecationWarning)
    try:
        return torch.jit.load(str(file), map_location=target.device)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"{file}: is no TorchScript file ({brief(error)}); torch.jit.save writes one. What torch.save writes "
            "is a pickle and is not loaded; what torch.export.save writes must be called .pt2",
            file=str(file),
        ) from error


def _missing(arguments: Sequence[Any], options: TorchOptions) -> str:
    inputs = "".join(f"\n    - {{name: {each.name}, datatype: FP32, shape: [-1, 4]}}" for each in arguments)
    which = " and ".join(f"torch.{name}" for name in ("inputs", "outputs") if not getattr(options, name))
    return (
        f"a TorchScript file tells no datatypes and shapes: model.yaml needs {which}, with -1 for any size, as in\n"
        f"torch:\n  inputs:{inputs}\n  outputs:\n    - {{name: y, datatype: FP32, shape: [-1, 2]}}"
    )


def _bind(file: Path, arguments: Sequence[Any], inputs: Sequence[DeclaredTensor]) -> list[str]:
    """The argument of each input: the one of its name where all have such, else the one at its place."""
    known = [argument.name for argument in arguments]
    given = [option.name for option in inputs]
    bound = given if set(given) <= set(known) else known[: len(given)]
    needed = {argument.name for argument in arguments if not argument.has_default_value()}
    if len(given) > len(known) or needed - set(bound):
        raise ConfigError(
            f"torch.inputs: {file.name} takes {', '.join(known) or 'nothing'}; given are {', '.join(given)}",
            file=str(file),
            reason="torch_inputs",
        )
    return bound


def _convert(module: Any, dtype: Any) -> None:
    """Autocast would convert these weights in every call. Other ops may not take them beside FP32."""
    for part in module.modules():
        if getattr(part, "original_name", "") in _MATRIX_MODULES and hasattr(part, "weight"):
            part.weight.data = part.weight.data.to(dtype)
