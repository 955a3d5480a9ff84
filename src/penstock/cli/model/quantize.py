"""`penstock model quantize`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import make_console, print_json
from penstock.cli.terminal.progress import show_steps
from penstock.cli.terminal.repository import MODELS, Repository
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.models.convert.quantize import Quantized
    from penstock.models.folder import ModelFolder

REFUSED = 1


def quantize(
    model: Annotated[str, typer.Argument(help="A model's name in the repository, or the path of its folder.")],
    repository: Repository = MODELS,
    version: Annotated[str, typer.Option(metavar="N", help="Which to convert. [default: the newest served]")] = "",
    precision: Annotated[
        Literal["int8", "fp16"], typer.Option(help="INT8 is for CPUs and TensorRT, FP16 for GPUs or for size.")
    ] = "int8",
    method: Annotated[
        Literal["auto", "dynamic", "static", "openvino", "tensorrt"],
        typer.Option(help="How; auto tries all that fit and takes the fastest above the floor."),
    ] = "auto",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Your own data: a text file (one a line), .jsonl, a folder of images, or .npz of tensors."),
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="The floor. [default: 0.98; score 0.95; upscale 40 dB]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Publish also what is below the floor.")] = False,
    keep_serving: Annotated[
        bool, typer.Option("--keep-serving", help="Pin the version that is served now in model.yaml.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a smaller and faster version of a model, and say what that costs in accuracy."""
    from penstock.models.convert.quantize import quantize as run
    from penstock.models.convert.report import Order

    folder = _find(model, repository)
    order = Order(version, precision, method, calibration, min_accuracy, force, keep_serving)
    with show_steps(f"quantizing {folder.name}") as tell:
        outcome = run(folder, order, tell)
    if as_json:
        print_json({**outcome.report, "version": outcome.version or None, "refusal": outcome.refusal})
    else:
        _print_table(outcome.report)
        _print_end(folder, outcome, keep_serving)
    if not outcome.version:
        sys.exit(REFUSED)


def _find(model: str, repository: Path) -> "ModelFolder":
    from penstock.models.folder import read_model_folder

    path = next((path for path in (repository / model, Path(model)) if (path / "model.yaml").is_file()), None)
    if path is None:
        raise ConfigError(f"{model}: neither a model in {repository} nor the path of a model's folder")
    return read_model_folder(path.absolute())


def _print_table(report: Mapping[str, Any]) -> None:
    from rich.table import Table

    unit, original = report["samples"]["unit"], report["original"]
    table = Table("", "engine", "runs in", "size", f"{unit}/s", "speed", "vs FP32", "accuracy", "")
    size = _megabytes(original["size_bytes"])
    served = f"{original['per_s']:g}"
    table.add_row(f"version {report['of_version']}", original["engine"], original["runs_in"], size, served, "1.00 ×")
    for row in report["candidates"]:
        if "problem" in row:
            table.add_row(row["method"], row["engine"], *[""] * 6, row["problem"])
            continue
        speed, accuracy = row["speed"], row["accuracy"]
        is_taken = row["method"] == report.get("method")
        table.add_row(
            row["method"],
            row["engine"],
            row["runs_in"],
            f"{_megabytes(row['size']['bytes'])} ({row['size']['of_original']:.0%})",
            f"{speed['per_s']:g}",
            f"{speed['over_original']:.2f} × ±{speed['over_original_spread']:.0%}",
            f"{speed['over_fp32']:.2f} ×",
            f"{accuracy['measure']} {accuracy['value']:.4f} {accuracy['unit']}".rstrip(),
            ("taken" if is_taken else "") if accuracy["is_met"] else f"below {accuracy['floor']:g}",
        )
    make_console(160).print(table)


def _print_end(folder: "ModelFolder", outcome: "Quantized", keeps_serving: bool) -> None:
    report = outcome.report
    samples = report["samples"]
    kind = "of random numbers, which tell little: give --calibration" if samples["are_random"] else samples["source"]
    print(f"accuracy against the original in FP32 on {samples['held_out']} {samples['unit']} ({kind});")
    print(f"calibrated on {samples['calibration']} others where the method needs it")
    for line in _details(report):
        print(f"  {line}")
    if not outcome.version:
        print(f"penstock: {folder.name}: refused: {outcome.refusal}", file=sys.stderr)
        return
    if report["is_forced"]:
        print("forced: it is below the floor")
    if report["speed"]["over_original"] < 1 and report["precision"] == "int8":
        print("note: on this machine it is slower than the version that it was made of")
    print(f"published as version {outcome.version}: {folder.path / outcome.version}")
    print(_serving(folder, outcome.version, keeps_serving))


def _details(report: Mapping[str, Any]) -> list[str]:
    details = report.get("accuracy", {}).get("details", {})
    return [
        f"{name}: "
        + (", ".join(f"{key} {value:g}" for key, value in found.items()) if isinstance(found, dict) else f"{found:g}")
        for name, found in details.items()
    ]


def _serving(folder: "ModelFolder", version: str, keeps_serving: bool) -> str:
    chosen = folder.settings.versions
    if chosen == "latest" and keeps_serving:
        return f"model.yaml now says versions: [{folder.versions[-1]}], which goes on being served"
    if chosen == "latest":
        return (
            f"model.yaml says versions: latest: version {version} is served from the next load of the model "
            "(penstock serve anew, or load it by the API); to go back, remove its folder"
        )
    if chosen == "all":
        return "model.yaml says versions: all: both are served from the next load, the new one where none is named"
    return f"model.yaml serves versions {list(chosen)}: add {version} to them to serve it"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
