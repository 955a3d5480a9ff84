"""Opens a model's PyTorch file; the file's name decides its format."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.signature import DeclaredTensor
from penstock.core.tensors import BYTES
from penstock.engines.availability import TORCH_FOLDERS
from penstock.engines.engine_options import TorchOptions
from penstock.engines.out_of_memory import as_out_of_memory
from penstock.engines.torch.torch_devices import Target
from penstock.engines.torch.torch_model import TorchModel, brief_message, choose_precision

KINDS = (
    "model.pt (TorchScript), model.pt2 (torch.export), modules.json (sentence-transformers), config.json, "
    "or the ONNX file of an image network"
)
_MATRIX_MODULES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_PICKLES = (".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def open_file(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    """Open the file; raise ConfigError if it cannot be loaded."""
    _check_options(options)
    try:
        return _open_by_name(file, options, target)
    except PenstockError:
        raise
    except Exception as error:
        if (lack := as_out_of_memory(error, target.name)) is not None:
            raise lack from error
        raise ConfigError(f"{file}: PyTorch cannot load it: {brief_message(error)}", file=str(file)) from error


def _open_by_name(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    if file.name in TORCH_FOLDERS:
        if options.inputs or options.outputs:
            raise _tensor_options_error(
                f"remove torch.inputs and torch.outputs from model.yaml: {file.name} already defines them"
            )
        from penstock.engines.torch import folders as torch_folders

        if file.name == "modules.json":
            return torch_folders.open_sentence_encoder(file.parent, target)
        return torch_folders.open_classifier(file.parent, target)
    if file.suffix == ".pt2":
        from penstock.engines.torch.export import open_program

        return open_program(file, options, target)
    if file.suffix in (".pt", ".ts", ".torchscript"):
        return _open_script(file, options, target)
    if file.suffix == ".onnx":
        from penstock.engines.torch.convolutions import open_network

        return open_network(file, target)
    raise ConfigError(f"file: {file.name}: {_format_advice(file.suffix)}", file=str(file))


def _open_script(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    """Open a TorchScript file, which contains the names of its arguments, but not their datatypes and shapes."""
    module = _load_script(file, target)
    module.eval()
    arguments = module.forward.schema.arguments[1:]  # without the module itself
    if not (options.inputs and options.outputs):
        raise ConfigError(
            f"{file.name}: {_missing_options_message(arguments, options)}", file=str(file), reason="torch_inputs"
        )
    names = _bind_arguments(file, arguments, options.inputs)
    precision, autocast = choose_precision(file, [*module.parameters(), *module.buffers()], target)
    if autocast is not None:
        _convert_weights(module, autocast)

    def forward(tensors: Sequence[Any]) -> Any:
        return module(**dict(zip(names, tensors, strict=True)))

    return TorchModel(
        tuple(tensor.spec for tensor in options.inputs),
        tuple(tensor.spec for tensor in options.outputs),
        precision,
        module,
        forward,
        may_compile=False,
        autocast=autocast,
    )


def _load_script(file: Path, target: Target) -> Any:
    # PyTorch recommends torch.export; the operator has chosen TorchScript.
    warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", DeprecationWarning)
    try:
        return torch.jit.load(str(file), map_location=target.device)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"{file}: is not a TorchScript file ({brief_message(error)}); write one with torch.jit.save. "
            "A file of torch.save is a pickle and is not loaded; a file of torch.export.save must be named .pt2",
            file=str(file),
        ) from error


def _missing_options_message(arguments: Sequence[Any], options: TorchOptions) -> str:
    inputs = "".join(f"\n    - {{name: {each.name}, datatype: FP32, shape: [-1, 4]}}" for each in arguments)
    which = " and ".join(f"torch.{name}" for name in ("inputs", "outputs") if not getattr(options, name))
    return (
        f"a TorchScript file has no datatypes and shapes: model.yaml needs {which}, with -1 for any size, as in\n"
        f"torch:\n  inputs:{inputs}\n  outputs:\n    - {{name: y, datatype: FP32, shape: [-1, 2]}}"
    )


def _bind_arguments(file: Path, arguments: Sequence[Any], inputs: Sequence[DeclaredTensor]) -> list[str]:
    """Return the argument of the module for each input: by name if the module has all names, otherwise by position."""
    known = [argument.name for argument in arguments]
    given = [option.name for option in inputs]
    bound = given if set(given) <= set(known) else known[: len(given)]
    needed = {argument.name for argument in arguments if not argument.has_default_value()}
    if len(given) > len(known) or needed - set(bound):
        raise ConfigError(
            f"torch.inputs has {', '.join(given)}, but {file.name} takes {', '.join(known) or 'nothing'}: list these",
            file=str(file),
            reason="torch_inputs",
        )
    return bound


def _convert_weights(module: Any, dtype: Any) -> None:
    """Convert the weights that autocast would convert in every call; all other weights stay in FP32."""
    for part in module.modules():
        if getattr(part, "original_name", "") in _MATRIX_MODULES and hasattr(part, "weight"):
            part.weight.data = part.weight.data.to(dtype)


def _format_advice(suffix: str) -> str:
    if suffix in _PICKLES:
        return (
            "this is a pickle, which could run code while loading; save the module as TorchScript "
            "(torch.jit.save) or with torch.export.save, or its weights as model.safetensors"
        )
    if suffix == ".safetensors":
        return "this file has only weights; set file to the modules.json or config.json beside it"
    return f"engine: torch reads {KINDS}"


def _check_options(options: TorchOptions) -> None:
    for place, tensors in (("torch.inputs", options.inputs), ("torch.outputs", options.outputs)):
        for tensor in tensors:
            if tensor.datatype == BYTES:
                raise _tensor_options_error(f"{place}: '{tensor.name}' is BYTES, which PyTorch does not support")


def _tensor_options_error(message: str) -> ConfigError:
    return ConfigError(message, reason="torch_inputs")
