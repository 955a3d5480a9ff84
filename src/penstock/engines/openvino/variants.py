"""OpenVINO's own files of a model: INT8 by NNCF with a calibration set, and FP16 weights.

NNCF imports PyTorch where it is installed, prints, and sets loggers: it runs in a process of its own,
`python -m penstock.engines.openvino.variants`.
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
from penstock.engines.onnx.variants import writing

RECIPE = 1  # counts up when a conversion below changes
FILE = "model.xml"
TIMEOUT_S = 3600.0
ADVICE = "OpenVINO's INT8 needs NNCF: pip install 'penstock-serve[quantize]'"


def is_available() -> bool:
    return importlib.util.find_spec("nncf") is not None


def write_int8(source: Path, target: Path, calibration: Sequence[Mapping[str, Array]], is_text: bool) -> None:
    """`target` is an .xml file, its weights lie in the .bin file beside it. `is_text`: a transformer over tokens."""
    if not is_available():
        raise ConfigError(ADVICE)
    with writing(source, target, "int8") as partial, TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.npz"
        arrays: dict[str, Any] = {
            f"{number}/{name}": array for number, sample in enumerate(calibration) for name, array in sample.items()
        }
        np.savez(samples, **arrays)
        command = [sys.executable, "-m", "penstock.engines.openvino.variants", str(source), str(partial), str(samples)]
        done = subprocess.run(
            [*command, "transformer" if is_text else "any"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "NNCF_CI": "1"},  # else it reports its use to its makers
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"NNCF ended with {done.returncode}"]
            raise ConfigError(f"{source}: cannot be converted to int8: {said[-1][:300]}", file=str(source))


def write_fp16(source: Path, target: Path) -> None:
    """Half the size; what it computes in is as the engine's precision says."""
    import openvino

    with writing(source, target, "fp16") as partial:
        openvino.save_model(openvino.Core().read_model(str(source)), str(partial), compress_to_fp16=True)


def _quantize(source: str, target: str, samples: str, kind: str) -> str:
    """Empty, or why not."""
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
        model_type=nncf.ModelType.TRANSFORMER if kind == "transformer" else None,
    )
    if not any(op.get_type_name() == "FakeQuantize" for op in model.get_ops()):
        return "NNCF found nothing to quantize in it"
    openvino.save_model(model, target, compress_to_fp16=False)
    return ""


if __name__ == "__main__":
    if problem := _quantize(*sys.argv[1:5]):
        sys.exit(problem)
