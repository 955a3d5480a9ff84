"""Builds the report of a quantization, which is stored as quantization.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.engines.onnx.onnx_variants import weight_files
from penstock.models.convert.calibration_samples import Samples
from penstock.models.convert.fidelity import Fidelity
from penstock.models.convert.methods import Method
from penstock.models.convert.speed import Speed
from penstock.models.folder import ModelFolder
from penstock.models.loading import ModelFile
from penstock.telemetry.machine import describe_machine

ORIGINAL, FP32 = "original", "fp32"


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    version: str = ""  # empty: the newest served version
    precision: str = "int8"
    method: str = "auto"
    calibration: Path | None = None
    min_accuracy: float | None = None  # None: the task's default floor
    is_forced: bool = False
    has_to_keep_serving: bool = False


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted file with its figures, or the reason why the conversion failed."""

    method: Method
    file: ModelFile | None = None
    recipe: Mapping[str, Any] | None = None
    problem: str = ""
    fidelity: Fidelity | None = None
    speed: Speed | None = None
    precision: str = ""  # in which the file runs

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in weight_files(self.file.file)) if self.file else 0


@dataclass(frozen=True, slots=True)
class QuantizationRun:
    folder: ModelFolder
    version: str
    options: QuantizationOptions
    floor: float
    samples: Samples
    original: ModelFile
    candidates: Sequence[Conversion]
    speeds: Mapping[str, Speed]
    served_in: str  # precision of the original as served


def build_report(run: QuantizationRun, chosen: Conversion | None) -> dict[str, Any]:
    original_bytes = sum(file.stat().st_size for file in weight_files(run.original.file))
    rows = [_build_row(each, run, original_bytes) for each in run.candidates]
    facts: dict[str, Any] = {
        "model": run.folder.name,
        "task": run.original.settings.task,
        "of_version": run.version,
        "precision": run.options.precision,
        "samples": {
            "source": run.samples.source,
            "unit": run.samples.unit,
            "calibration": len(run.samples.calibration_requests),
            "held_out": run.samples.held_out_count,
            "are_random": run.samples.source == "random numbers",
        },
        "original": {
            "engine": run.original.settings.engine,
            "runs_in": run.served_in,
            "size_bytes": original_bytes,
            "per_s": round(run.speeds[ORIGINAL].per_s, 2),
            "fp32_per_s": round(run.speeds[FP32].per_s, 2),
        },
        "candidates": rows,
        "machine": describe_machine(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if chosen is not None and chosen.fidelity is not None:
        own = next(row for row in rows if row["method"] == chosen.method.name)
        facts = {**facts, **own, "is_forced": chosen.fidelity.value < run.floor}
    return facts


def _build_row(conversion: Conversion, run: QuantizationRun, original_bytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"method": conversion.method.name, "engine": conversion.method.engine}
    if conversion.fidelity is None or conversion.speed is None:
        return {**row, "problem": conversion.problem}
    over, noise = conversion.speed.compare_with(run.speeds[ORIGINAL])
    over_fp32, noise_fp32 = conversion.speed.compare_with(run.speeds[FP32])
    return {
        **row,
        "runs_in": conversion.precision,
        "recipe": conversion.recipe or {},
        "size": {"bytes": conversion.size_bytes, "of_original": round(conversion.size_bytes / original_bytes, 4)},
        "speed": {
            "per_s": round(conversion.speed.per_s, 2),
            "over_original": round(over, 3),
            "over_original_spread": round(noise, 3),
            "over_fp32": round(over_fp32, 3),
            "over_fp32_spread": round(noise_fp32, 3),
            "rounds": len(conversion.speed.rounds),
        },
        "accuracy": {
            **asdict(conversion.fidelity),
            "floor": run.floor,
            "is_met": conversion.fidelity.value >= run.floor,
        },
    }
