"""The model repository of the benchmark: the shipped models, variants of them, and a no-op."""

from pathlib import Path

from benchmarks.repository import link_model
from penstock.core.errors import ConfigError
from penstock.models.convert.quantize import quantize
from penstock.models.convert.report import QuantizationOptions
from penstock.models.folder import read_model_folder
from penstock.models.samples.noop import NOOP, write_noop

CACHED = "identity-cached"  # as NOOP, with the response cache
SHIPPED = "minilm"
FP32 = "minilm-fp32"  # as shipped, on ONNX Runtime in FP32
ARRIVAL = "minilm-arrival32"  # as FP32, but batches of 32 in arrival order, padded to the longest
INT8 = "minilm-int8"  # as FP32, quantized: its version 2
SINGLE = "minilm-single"  # as FP32, but one text at a time
PHOTOS = "srcnn"


def build_repository(models: Path, target: Path) -> Path:
    """Build the repository from the shipped `models`; weights are linked, not copied."""
    link_model(models / SHIPPED, target / SHIPPED)
    link_model(models / SHIPPED, target / FP32, engine="onnx", precision="fp32")
    link_model(target / FP32, target / ARRIVAL, batching={"max_rows": 32, "max_tokens": None, "order": "arrival"})
    link_model(target / FP32, target / SINGLE, batching={"max_rows": 1})
    link_model(models / PHOTOS, target / PHOTOS)
    write_noop(target / NOOP)
    write_noop(target / CACHED, cache={"enabled": True})
    return target


def add_int8(repository: Path) -> float:
    """Add the result of `penstock model quantize --method dynamic`; return the mean cosine of its report."""
    link_model(repository / FP32, repository / INT8)
    outcome = quantize(read_model_folder(repository / INT8), QuantizationOptions(method="dynamic"))
    if not outcome.version:
        raise ConfigError(f"{INT8}: {outcome.refusal}")
    return float(outcome.report["accuracy"]["details"]["cosine"]["mean"])
