"""The machine that figures were taken on."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from penstock.telemetry.control_groups import usable_cores
from penstock.telemetry.devices import open_gpus

PACKAGES = {"penstock": "penstock-serve"} | {
    name: name for name in ("onnxruntime", "onnxruntime-gpu", "openvino", "torch", "numpy", "grpcio")
}  # as they are told of, and as they are installed


def describe_machine() -> dict[str, str]:
    return {
        "processor": processor(),
        "cores": str(usable_cores()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        **({"gpu": ", ".join(gpus)} if (gpus := _gpus()) else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name, package in PACKAGES.items() if (found := installed_version(package))},
    }


def _gpus() -> list[str]:
    return [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in open_gpus().visible]


def processor() -> str:
    """Linux names it in /proc alone."""
    return _processor_line("model name") or platform.processor()


def processor_features() -> frozenset[str]:
    """What it can beside what all of its kind can: avx512_bf16, amx_bf16, …; none where the system does not tell."""
    return frozenset((_processor_line("flags") or _processor_line("Features")).split())


def _processor_line(name: str) -> str:
    """Of the first core; empty: there is none."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                if line.startswith(name):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def installed_version(package: str) -> str:
    """Empty: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
