"""Converts models to OpenVINO's own files: to INT8 with NNCF and calibration data, or to FP16 weights.

NNCF imports PyTorch if it is installed, prints, and sets loggers, so it runs in a separate process: `python -m
penstock.engines.openvino.openvino_variants`.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.tensors import Array
from penstock.engines.onnx.onnx_variants import converting_to

RECIPE = 1  # increase this number when a conversion below changes, so that older files are not used
FILE = "model.xml"
TIMEOUT_S = 3600.0
ADVICE = "OpenVINO's INT8 needs NNCF: pip install 'penstock-serve[quantize]'"


def is_available() -> bool:
    return importlib.util.find_spec("nncf") is not None


def write_int8(source: Path, target: Path, calibration: Sequence[Mapping[str, Array]], is_text: bool) -> None:
    """Quantize to an INT8 .xml file, and a .bin file with its weights. `is_text`: the network is a transformer."""
    if not is_available():
        raise ConfigError(ADVICE)
    with converting_to(source, target, "int8") as partial, TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.npz"
        arrays: dict[str, Any] = {
            f"{number}/{name}": array for number, sample in enumerate(calibration) for name, array in sample.items()
        }
        np.savez(samples, **arrays)
        command = [
            sys.executable,
            "-m",
            "penstock.engines.openvino.openvino_variants",
            str(source),
            str(partial),
            str(samples),
        ]
        done = subprocess.run(
            [*command, "transformer" if is_text else "any"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "NNCF_CI": "1"},  # otherwise NNCF sends usage statistics
        )
        if done.returncode:
            messages = done.stderr.strip().splitlines() or [f"NNCF ended with {done.returncode}"]
            raise ConfigError(f"{source}: cannot be converted to int8: {messages[-1][:300]}", file=str(source))


def write_fp16(source: Path, target: Path) -> None:
    """Write the weights in FP16, which halves the file. The precision of the computation does not change."""
    import openvino

    with converting_to(source, target, "fp16") as partial:
        openvino.save_model(openvino.Core().read_model(str(source)), str(partial), compress_to_fp16=True)


def _quantize(source: str, target: str, samples: str, network_kind: str) -> str:
    """Quantize the network; return an empty text, or why the quantization failed."""
    import nncf
    import openvino

    with np.load(samples, allow_pickle=False) as stored:
        found: dict[int, dict[str, Array]] = {}
        for key in stored.files:
            number, _, name = key.partition("/")
            found.setdefault(int(number), {})[name] = stored[key]
    model = nncf.quantize(
        openvino.Core().read_model(source),
        nncf.Dataset(list(found.values())),
        subset_size=len(found),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER if network_kind == "transformer" else None,
    )
    if not any(op.get_type_name() == "FakeQuantize" for op in model.get_ops()):
        return "NNCF found no operation to quantize"
    openvino.save_model(model, target, compress_to_fp16=False)
    return ""


if __name__ == "__main__":
    if problem := _quantize(*sys.argv[1:5]):
        sys.exit(problem)
