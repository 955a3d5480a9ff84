"""`penstock bench --device`: measure a model's latency on a device without a server."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.error_text import show_size
from penstock.terminal.output import lay_out, make_console, print_json
from penstock.terminal.repository_options import find_repository

if TYPE_CHECKING:
    from penstock.experiments.frames import BenchedModel, FrameBench, FrameStep, FrameTimes
    from penstock.models.folder import ModelFolder

SIZES = "1:32:*2"


def find_folder(model: str, models: Path | None) -> "ModelFolder":
    """Return the newest version of a model. `model` is a name in the repository or the path of a model's folder."""
    from penstock.models.folder import find_model, is_model, read_model_folder

    path = Path(model)
    if not is_model(path):
        path = find_model(find_repository(models), model)
    folder = read_model_folder(path.resolve())
    return folder.of_version(folder.versions[-1])


def bench_frames(bench: "FrameBench", as_json: bool) -> None:
    from penstock.experiments.frames import FrameRun
    from penstock.telemetry.machine import describe_machine

    run = FrameRun(bench)
    with run as loaded:
        if as_json:
            steps = [step.to_json() for step in run.steps()]
            print_json({**asdict(loaded), "machine": describe_machine(), "steps": steps})
        else:
            _print_times(loaded, run.steps())


def _print_times(loaded: "BenchedModel", steps: Iterator["FrameStep"]) -> None:
    from rich.live import Live

    console = make_console()
    memory = f", {show_size(loaded.device_memory_bytes)} of its memory" if loaded.device_memory_bytes else ""
    console.print(
        f"{loaded.model} version {loaded.version}: {loaded.engine} {loaded.precision} on {loaded.device}{memory}, "
        f"loaded in {loaded.load_s:.1f} s",
        markup=False,
        highlight=False,
    )
    heads = (
        "rows",
        "ms/batch\np50",
        "p99",
        "ms/frame\np50",
        "p99",
        "frames/s",
        "with the task\nms/frame p50",
        "p99",
    )
    titles, rows, problems = ("batch\nsize", *heads), list[tuple[str, ...]](), list[str]()
    with Live(console=console, auto_refresh=False) as live:
        for step in steps:
            if step.problem:
                problems.append(f"batch size {step.batch_size}: {step.problem}")
            else:
                times = (*_format_cells(step.batch_ms), *_format_cells(step.ms_per_frame))
                whole = _format_cells(step.whole_ms_per_frame)
                rows.append((str(step.batch_size), str(step.rows), *times, f"{step.frames_per_s:,.1f}", *whole))
            live.update(lay_out(console, titles, rows), refresh=True)
    for problem in problems:
        console.print(problem, markup=False)


def _format_cells(times: "FrameTimes | None") -> tuple[str, str]:
    return ("-", "-") if times is None else (f"{times.p50:.3f}", f"{times.p99:.3f}")
