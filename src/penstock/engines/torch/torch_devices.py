"""Chooses PyTorch's device and precision, and checks that the machine supports them."""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NEEDS = {
    "cuda": "an NVIDIA GPU with its driver, and a PyTorch that is built for CUDA (see pytorch.org)",
    "mps": "an Apple GPU and PyTorch's package for macOS",
}


@dataclass(frozen=True, slots=True)
class Target:
    name: str  # cpu, cuda, cuda:1, mps
    precision: str  # auto, fp32, bf16, fp16

    @property
    def device(self) -> Any:
        return torch.device(self.name)

    @property
    def device_kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def dtype(self) -> Any:
        """Return the dtype to which the weights of a model folder are converted while loading."""
        return DTYPES[self.precision if self.precision != "auto" else "fp32"]


def choose_target(device: str, precision: str) -> Target:
    """Return the device and precision to use; raise ConfigError if the machine does not support them."""
    if precision != "auto" and precision not in DTYPES:
        raise ConfigError(
            f"precision {precision} is not supported by engine torch: use fp32, bf16 or fp16",
            reason="unsupported_precision",
        )
    counts = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    name = next(kind for kind, count in counts.items() if count) if device == "auto" else device
    kind, _, index = name.partition(":")
    if kind != "cpu" and int(index or 0) >= counts[kind]:
        gpus = [f"cuda:{number}" for number in range(counts["cuda"])]
        there = ", ".join(["cpu", *gpus, *["mps"] * counts["mps"]])
        missing = "GPU" if counts[kind] else f"device, which needs {_NEEDS[kind]}"
        raise ConfigError(
            f"instances.device {name}: this machine has no such {missing}; choose one of: auto, {there}",
            reason="device_missing",
        )
    _check_precision(kind, precision)
    return Target(name, precision)


def _check_precision(device_kind: str, precision: str) -> None:
    if precision == "fp16" and device_kind == "cpu":
        raise ConfigError(
            "precision fp16 needs instances.device cuda or mps; on the CPU use precision: bf16 or fp32",
            reason="device_missing",
        )
    if precision == "bf16" and device_kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            "precision bf16: this GPU does not support it; use precision: fp16", reason="unsupported_precision"
        )
    if precision == "bf16" and device_kind == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ConfigError("precision bf16 needs macOS 14 or later; use precision: fp16", reason="unsupported_precision")
