"""Which kind of PyTorch file a model is, by its name, and what opens it."""

from pathlib import Path

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.tensors import BYTES
from penstock.engines.availability import TORCH_FOLDERS
from penstock.engines.options import TorchOptions
from penstock.engines.out_of_memory import out_of_memory
from penstock.engines.torch.devices import Target
from penstock.engines.torch.model import TorchModel, brief

KINDS = (
    "model.pt (TorchScript), model.pt2 (torch.export), modules.json (sentence-transformers), config.json, "
    "or the ONNX file of an image network"
)
_PICKLES = (".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def open_file(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    """Raises ConfigError with what is wrong."""
    _check_options(options)
    try:
        return _open(file, options, target)
    except PenstockError:
        raise
    except Exception as error:
        if (lack := out_of_memory(error, target.name)) is not None:
            raise lack from error
        raise ConfigError(f"{file}: PyTorch cannot load it: {brief(error)}", file=str(file)) from error


def _open(file: Path, options: TorchOptions, target: Target) -> TorchModel:
    if file.name in TORCH_FOLDERS:
        if options.inputs or options.outputs:
            raise _wrong(f"torch.inputs and torch.outputs: a folder with {file.name} tells them; take them out")
        from penstock.engines.torch import folders as torch_folders

        if file.name == "modules.json":
            return torch_folders.open_sentence_encoder(file.parent, target)
        return torch_folders.open_classifier(file.parent, target)
    if file.suffix == ".pt2":
        from penstock.engines.torch.export import open_program

        return open_program(file, options, target)
    if file.suffix in (".pt", ".ts", ".torchscript"):
        from penstock.engines.torch.script import open_script

        return open_script(file, options, target)
    if file.suffix == ".onnx":
        from penstock.engines.torch.convolutions import open_network

        return open_network(file, target)
    raise ConfigError(f"file: {file.name}: {_advice(file.suffix)}", file=str(file))


def _advice(suffix: str) -> str:
    if suffix in _PICKLES:
        return (
            "this is a pickle, which runs code as it is read, and is not loaded; save the module as TorchScript "
            "(torch.jit.save) or with torch.export.save, or its weights as model.safetensors"
        )
    if suffix == ".safetensors":
        return "these are weights alone; name modules.json or config.json, which lie beside them"
    return f"engine: torch reads {KINDS}"


def _check_options(options: TorchOptions) -> None:
    for place, tensors in (("torch.inputs", options.inputs), ("torch.outputs", options.outputs)):
        for tensor in tensors:
            if tensor.datatype == BYTES:
                raise _wrong(f"{place}: '{tensor.name}' is BYTES, and PyTorch has no tensors of bytes")


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, reason="torch_inputs")
