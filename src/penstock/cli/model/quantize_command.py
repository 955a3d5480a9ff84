"""`penstock model quantize`: add an INT8 or FP16 version to a model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.terminal.output import print_json, print_rows
from penstock.terminal.progress import show_steps
from penstock.terminal.repository_options import MODELS, Repository
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.models.convert.quantize import QuantizationOutcome
    from penstock.models.folder import ModelFolder

REFUSED = 1


def quantize(
    model: Annotated[str, typer.Argument(help="Name of a model in the repository, or the path of its folder.")],
    repository: Repository = MODELS,
    version: Annotated[str, typer.Option(metavar="N", help="Version to convert. [default: the newest served]")] = "",
    precision: Annotated[
        Literal["int8", "fp16"],
        typer.Option(help="Precision: int8 for CPUs and TensorRT; fp16 for GPUs or smaller files."),
    ] = "int8",
    method: Annotated[
        Literal["auto", "dynamic", "static", "openvino", "tensorrt"],
        typer.Option(help="Conversion method; auto tries all that apply and keeps the fastest above --min-accuracy."),
    ] = "auto",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Calibration data: a text file (one text per line), .jsonl, a folder of images, or .npz with tensors. "
            "[default: samples that fit the model]"
        ),
    ] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(
            help="Minimum accuracy compared with the original in FP32. [default: 0.98; task score 0.95; upscale 40 dB]"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Publish the version even if its accuracy is below --min-accuracy.")
    ] = False,
    keep_serving: Annotated[
        bool, typer.Option("--keep-serving", help="Pin the currently served version in model.yaml.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a smaller and faster version of a model.

    Reports the accuracy and speed of the new version.
    """
    from penstock.models.convert.quantize import quantize as run
    from penstock.models.convert.report import QuantizationOptions

    folder = _find_version(model, repository)
    order = QuantizationOptions(version, precision, method, calibration, min_accuracy, force, keep_serving)
    with show_steps(f"quantizing {folder.name}") as show_step:
        outcome = run(folder, order, show_step)
    if as_json:
        print_json({**outcome.report, "version": outcome.version or None, "refusal": outcome.refusal})
    else:
        _print_table(outcome.report)
        _print_end(folder, outcome, keep_serving)
    if not outcome.version:
        sys.exit(REFUSED)


def _find_version(model: str, repository: Path) -> "ModelFolder":
    from penstock.models.folder import find_model, read_model_folder

    return read_model_folder(find_model(repository, model).absolute())


def _print_table(report: Mapping[str, Any]) -> None:
    unit, original = report["samples"]["unit"], report["original"]
    titles = ("", "engine", "runs in", "size", f"{unit}/s", "speed", "vs FP32", "accuracy", "")
    size = _format_megabytes(original["size_bytes"])
    served = f"{original['per_s']:g}"
    rows = [
        (f"version {report['of_version']}", original["engine"], original["runs_in"], size, served, "1.00 ×", *[""] * 3)
    ]
    for row in report["candidates"]:
        if "problem" in row:
            rows.append((row["method"], row["engine"], *[""] * 6, row["problem"]))
            continue
        speed, accuracy = row["speed"], row["accuracy"]
        is_taken = row["method"] == report.get("method")
        cells = (
            row["method"],
            row["engine"],
            row["runs_in"],
            f"{_format_megabytes(row['size']['bytes'])} ({row['size']['of_original']:.0%})",
            f"{speed['per_s']:g}",
            f"{speed['over_original']:.2f} × ±{speed['over_original_spread']:.0%}",
            f"{speed['over_fp32']:.2f} ×",
            f"{accuracy['measure']} {accuracy['value']:.4f} {accuracy['unit']}".rstrip(),
            ("taken" if is_taken else "") if accuracy["is_met"] else f"below {accuracy['floor']:g}",
        )
        rows.append(cells)
    print_rows(titles, rows, "nothing was tried")


def _print_end(folder: "ModelFolder", outcome: "QuantizationOutcome", keeps_serving: bool) -> None:
    report = outcome.report
    samples = report["samples"]
    random = "random numbers, so the figure means little: give --calibration"
    kind = random if samples["are_random"] else samples["source"]
    print(f"accuracy compared with the original in FP32 on {samples['held_out']} {samples['unit']} ({kind});")
    print(f"methods that need calibration used {samples['calibration']} other {samples['unit']}")
    for line in _format_details(report):
        print(f"  {line}")
    if not outcome.version:
        print(f"penstock: {folder.name}: refused: {outcome.refusal}", file=sys.stderr)
        return
    if report["is_forced"]:
        print("forced: the accuracy is below --min-accuracy")
    if report["speed"]["over_original"] < 1 and report["precision"] == "int8":
        print("note: on this machine the new version is slower than the original")
    print(f"published as version {outcome.version}: {folder.path / outcome.version}")
    print(_describe_serving(folder, outcome.version, keeps_serving))


def _format_details(report: Mapping[str, Any]) -> list[str]:
    details = report.get("accuracy", {}).get("details", {})
    return [
        f"{name}: "
        + (", ".join(f"{key} {value:g}" for key, value in found.items()) if isinstance(found, dict) else f"{found:g}")
        for name, found in details.items()
    ]


def _describe_serving(folder: "ModelFolder", version: str, keeps_serving: bool) -> str:
    chosen = folder.settings.versions
    if chosen == "latest" and keeps_serving:
        return f"model.yaml now has versions: [{folder.versions[-1]}], so this version continues to be served"
    if chosen == "latest":
        return (
            f"model.yaml has versions: latest, so version {version} is served after the next load of the model "
            f"(`penstock model load {folder.name}`, or a restart of the server); to go back, remove the version's "
            "folder"
        )
    if chosen == "all":
        return (
            "model.yaml has versions: all, so both versions are served after the next load; "
            "requests without a version go to the new version"
        )
    return f"model.yaml serves versions {list(chosen)}; to serve version {version}, add it there"


def _format_megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
