"""A description of the machine, for measurements."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from penstock.telemetry.control_groups import count_usable_cores
from penstock.telemetry.gpus import open_gpus

PACKAGES = {"penstock": "penstock-serve"} | {
    name: name for name in ("onnxruntime", "onnxruntime-gpu", "openvino", "torch", "numpy", "grpcio")
}  # shown name: installed package


def describe_machine() -> dict[str, str]:
    return {
        "processor": read_processor_name(),
        "cores": str(count_usable_cores()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        **({"gpu": ", ".join(gpus)} if (gpus := _describe_gpus()) else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name, package in PACKAGES.items() if (found := find_installed_version(package))},
    }


def _describe_gpus() -> list[str]:
    return [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in open_gpus().visible]


def read_processor_name() -> str:
    """Return the processor's name. On Linux only /proc contains the name."""
    return _read_processor_line("model name") or platform.processor()


def read_processor_features() -> frozenset[str]:
    """Return the processor's optional features (avx512_bf16, amx_bf16, …); empty if the system does not list them."""
    return frozenset((_read_processor_line("flags") or _read_processor_line("Features")).split())


def _read_processor_line(name: str) -> str:
    """Return the value of a line in /proc/cpuinfo for the first core, or an empty text."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                if line.startswith(name):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def find_installed_version(package: str) -> str:
    """Return the installed version of a package, or an empty text."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
