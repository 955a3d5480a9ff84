"""PyTorch on the CPU, on an NVIDIA GPU or on an Apple GPU."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.signature import Signature
from penstock.core.tensors import Array
from penstock.engines.base import EngineSpec
from penstock.engines.options import TorchOptions

if TYPE_CHECKING:
    from penstock.engines.torch.runner import TorchRunner

PLATFORM = "pytorch_libtorch"
FOLDER_PACKAGES = {"modules.json": "sentence_transformers", "config.json": "transformers"}


class TorchEngine:
    """All instances share the module and its weights."""

    def __init__(self, spec: EngineSpec, options: TorchOptions) -> None:
        # Here, so that their memory is not taken for the model's.
        require("torch")
        if spec.file.name in FOLDER_PACKAGES:
            require(FOLDER_PACKAGES[spec.file.name])
        self._spec = spec
        self._options = options
        self._runner: TorchRunner | None = None

    def load(self) -> Signature:
        from penstock.engines.torch.devices import choose
        from penstock.engines.torch.files import open_file
        from penstock.engines.torch.runner import TorchRunner

        target = choose(self._spec.device, self._spec.precision)
        model = open_file(self._spec.file, self._options, target)
        self._runner = TorchRunner(model, target, self._spec.threads)
        if self._options.compile:
            self._runner.compile(self._spec.file)
        return Signature(model.inputs, model.outputs, PLATFORM, model.precision, target.name)

    def warm_up(self, inputs: Mapping[str, Array]) -> None:
        for instance in range(self._spec.instances):
            self.infer(instance, inputs, [])

    def infer(self, instance: int, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        assert self._runner is not None, "load the model first"
        return self._runner.run(instance, inputs, outputs)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def require(package: str) -> None:
    """Raises ConfigError where the package cannot be imported."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        advice = "pip install 'penstock-serve[torch]'"
        message = f"engine: torch needs the package {error.name}, which is not installed: {advice}"
        raise ConfigError(message, reason="package_missing") from error
    except (ImportError, OSError) as error:  # its libraries
        raise ConfigError(
            f"engine: torch: the package {package} cannot be imported: {error}", reason="package_missing"
        ) from error
