"""The benchmark's own model repository: the shipped models, variants of them to compare with, and a no-op."""

from pathlib import Path

import yaml

from penstock.core.errors import ConfigError
from penstock.models.convert.quantize import quantize
from penstock.models.convert.report import Order
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
    """`models` is the repository that ships; weights are linked, not copied."""
    shipped = yaml.safe_load((models / SHIPPED / "model.yaml").read_text())
    onnx = {**shipped, "engine": "onnx", "precision": "fp32"}
    _add(models / SHIPPED, target / SHIPPED, shipped)
    _add(models / SHIPPED, target / FP32, onnx)
    arrival = {**onnx["batching"], "max_rows": 32, "max_tokens": None, "order": "arrival"}
    _add(models / SHIPPED, target / ARRIVAL, {**onnx, "batching": arrival})
    _add(models / SHIPPED, target / SINGLE, {**onnx, "batching": {**onnx["batching"], "max_rows": 1}})
    _add(models / PHOTOS, target / PHOTOS, yaml.safe_load((models / PHOTOS / "model.yaml").read_text()))
    write_noop(target / NOOP)
    write_noop(target / CACHED, cache={"enabled": True})
    return target


def add_int8(repository: Path) -> float:
    """What `penstock model quantize --method dynamic` makes of FP32; returns the mean cosine of its report."""
    settings = yaml.safe_load((repository / FP32 / "model.yaml").read_text())
    _add(repository / FP32, repository / INT8, settings)
    outcome = quantize(read_model_folder(repository / INT8), Order(method="dynamic"))
    if not outcome.version:
        raise ConfigError(f"{INT8}: {outcome.refusal}")
    return float(outcome.report["accuracy"]["details"]["cosine"]["mean"])


def _add(source: Path, target: Path, settings: dict[str, object]) -> None:
    target.mkdir(parents=True)
    (target / "1").symlink_to((source / "1").resolve())
    (target / "model.yaml").write_text(yaml.safe_dump(settings))
