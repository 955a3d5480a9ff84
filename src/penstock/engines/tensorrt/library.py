"""Finds and imports the installed library, TensorRT or TensorRT-RTX; both have the same interface."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.core.errors import ConfigError

# Module names to try. Some releases of TensorRT-RTX have no module with the package's name.
MODULES = {"tensorrt": ("tensorrt",), "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
RTX = "tensorrt_rtx"
ADVICE = "pip install 'penstock-serve[tensorrt]' brings TensorRT-RTX; NVIDIA's own packages bring TensorRT"
MAX_ERRORS = 8  # errors kept per build


@dataclass(frozen=True, slots=True)
class TensorRtLibrary:
    name: str  # tensorrt, tensorrt_rtx
    version: str
    module: Any
    errors: deque[str]  # its errors, newest last
    logger: Any

    @property
    def title(self) -> str:
        return f"{TITLES[self.name]} {self.version}"

    def first_errors(self) -> str:
        """Return the oldest collected errors, or an empty text if there are none."""
        return "; ".join(" ".join(each.split())[:300] for each in list(self.errors)[:3])


def find_library(requested: str) -> TensorRtLibrary:
    """Return the library named `requested`; `auto` tries TensorRT, then TensorRT-RTX. Raise ConfigError if missing."""
    broken: list[str] = []
    for name in MODULES if requested == "auto" else (requested,):
        module = _import_first(MODULES[name], broken)
        if module is not None:
            errors: deque[str] = deque(maxlen=MAX_ERRORS)
            return TensorRtLibrary(name, str(module.__version__), module, errors, _make_logger(module, errors))
    if broken:
        raise ConfigError(f"engine: tensorrt: {broken[0]}", reason="package_missing")
    which = "neither TensorRT nor TensorRT-RTX is" if requested == "auto" else f"{TITLES[requested]} is not"
    raise ConfigError(f"engine: tensorrt: {which} installed: {ADVICE}", reason="package_missing")


def _import_first(names: Sequence[str], broken: list[str]) -> ModuleType | None:
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                broken.append(f"the package {name} cannot be imported: {error}")
        except (ImportError, OSError) as error:  # one of the package's libraries cannot be loaded
            broken.append(f"the package {name} cannot be imported: {error}")
    return None


def _make_logger(module: Any, errors: deque[str]) -> Any:
    """Return a logger that collects errors, because the library reports reasons only to its logger."""

    class Listener(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                errors.append(message)

    return Listener()
