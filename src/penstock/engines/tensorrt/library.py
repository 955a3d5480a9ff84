"""Which of NVIDIA's libraries is installed, TensorRT or TensorRT-RTX: they have one interface."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.core.errors import ConfigError

# What to import for each; the packages of TensorRT-RTX's parts have no module of its own name.
MODULES = {"tensorrt": ("tensorrt",), "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
RTX = "tensorrt_rtx"
ADVICE = "pip install 'penstock-serve[tensorrt]' brings TensorRT-RTX; NVIDIA's own packages bring TensorRT"
SAID = 8  # errors that are kept of one build


@dataclass(frozen=True, slots=True)
class TensorRtLibrary:
    name: str  # tensorrt, tensorrt_rtx
    version: str
    module: Any
    said: deque[str]  # its errors, newest last
    logger: Any

    @property
    def title(self) -> str:
        return f"{TITLES[self.name]} {self.version}"

    def last_words(self) -> str:
        """What it said of a failure, first what came first; empty: nothing."""
        return "; ".join(" ".join(each.split())[:300] for each in list(self.said)[:3])


def find_library(wanted: str) -> TensorRtLibrary:
    """`auto`: TensorRT, and TensorRT-RTX where that is not installed. Raises ConfigError with what to install."""
    broken: list[str] = []
    for name in MODULES if wanted == "auto" else (wanted,):
        module = _import(MODULES[name], broken)
        if module is not None:
            said: deque[str] = deque(maxlen=SAID)
            return TensorRtLibrary(name, str(module.__version__), module, said, _listen(module, said))
    if broken:
        raise ConfigError(f"engine: tensorrt: {broken[0]}", reason="package_missing")
    which = "neither TensorRT nor TensorRT-RTX is" if wanted == "auto" else f"{TITLES[wanted]} is not"
    raise ConfigError(f"engine: tensorrt: {which} installed: {ADVICE}", reason="package_missing")


def _import(names: Sequence[str], broken: list[str]) -> ModuleType | None:
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                broken.append(f"the package {name} cannot be imported: {error}")
        except (ImportError, OSError) as error:  # its libraries
            broken.append(f"the package {name} cannot be imported: {error}")
    return None


def _listen(module: Any, said: deque[str]) -> Any:
    """The library tells why something failed to its logger alone."""

    class Listener(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                said.append(message)

    return Listener()
