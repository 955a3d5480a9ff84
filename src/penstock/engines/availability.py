"""Reports which engines, devices and precisions this machine and this installation can run."""

from importlib import import_module
from pathlib import Path

from penstock.core.errors import ConfigError

TORCH_FOLDERS = {
    "modules.json": "sentence_transformers",
    "config.json": "transformers",
}  # each with the package that reads it
_TORCH_FILES = (".pt", ".pt2", ".ts", ".torchscript", ".json")


def explain_unsupported(engine: str, device: str, precision: str) -> str | None:
    """Return why this machine cannot run the engine with this device and precision, or None if it can."""
    if engine == "openvino":
        return _explain_unsupported_openvino(device, precision)
    if engine == "onnx":
        return _explain_unsupported_onnx(device)
    if engine == "torch":
        return _explain_unsupported_torch(device, precision)
    if engine == "tensorrt":
        return _explain_unsupported_tensorrt(device)
    if engine == "genai":
        return None if device == "cpu" else f"the genai engine runs on the CPU, not on {device}"
    return f"Penstock has no {engine} engine"


def explain_unreadable(engine: str, file: Path) -> str | None:
    """Return why the engine cannot read a file of this name, or None if it can."""
    is_torch = file.suffix in _TORCH_FILES
    if engine == "genai" and file.suffix not in (".gguf", ".xml"):
        return f"the genai engine reads GGUF files and OpenVINO folders, not {file.name}"
    if engine != "genai" and file.suffix == ".gguf":
        return f"{file.name} is a GGUF file: use engine: genai"
    if engine == "torch" and not is_torch:
        return (
            f"the torch engine reads TorchScript and torch.export files and transformers folders, not {file.name}; "
            "docs/torch-models.md describes how to save such a file"
        )
    if engine in ("onnx", "openvino", "tensorrt") and is_torch:
        return f"the {engine} engine reads ONNX files, and {file.name} is a PyTorch file"
    if engine == "tensorrt" and file.suffix != ".onnx":
        return f"the tensorrt engine reads ONNX, not {file.name}"
    return None


def _explain_unsupported_onnx(device: str) -> str | None:
    import onnxruntime

    from penstock.engines.onnx.onnx_engine import PROVIDERS

    provider = PROVIDERS[device.partition(":")[0]]
    if provider not in onnxruntime.get_available_providers():
        return f"the installed ONNX Runtime has no {provider}"
    return None


def _explain_unsupported_openvino(device: str, precision: str) -> str | None:
    if device != "cpu":
        return f"the openvino engine runs on the CPU, not on {device}"
    try:
        import_module("openvino")
    except ModuleNotFoundError:  # installations for GPUs do not have it
        return "the package openvino is not installed"
    if precision == "bf16":
        import openvino

        if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            return "the processor has neither AVX-512 BF16 nor AMX"
    return None


def _explain_unsupported_torch(device: str, precision: str) -> str | None:
    if precision == "int8":
        return "the torch engine does not run INT8; use engine: onnx or openvino"
    try:
        require_package("torch")
        from penstock.engines.torch.torch_devices import choose_target

        choose_target(device, precision)
    except ConfigError as error:
        return error.message
    return None


def _explain_unsupported_tensorrt(device: str) -> str | None:
    if device in ("cpu", "mps"):
        return f"the tensorrt engine runs on an NVIDIA GPU, not on {device}"
    from penstock.engines.tensorrt.gpu import open_gpu
    from penstock.engines.tensorrt.library import find_library
    from penstock.engines.tensorrt.tensorrt_engine import check_gpu

    try:
        check_gpu(find_library("auto"), open_gpu(device))
    except ConfigError as error:
        return error.message
    return None


def require_package(package: str) -> None:
    """Raise ConfigError if the package cannot be imported."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        advice = "pip install 'penstock-serve[torch]'"
        message = f"engine: torch needs the package {error.name}, which is not installed: {advice}"
        raise ConfigError(message, reason="package_missing") from error
    except (ImportError, OSError) as error:  # one of the package's libraries cannot be loaded
        raise ConfigError(
            f"engine: torch: the package {package} cannot be imported: {error}", reason="package_missing"
        ) from error
