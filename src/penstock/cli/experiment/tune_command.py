"""`penstock tune`: find the fastest settings of a model on this machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.experiment.device_bench import find_folder
from penstock.core.errors import InvalidRequest
from penstock.terminal.interrupts import raise_on_signals
from penstock.terminal.load import BatchSize, LoadProtocol, Shapes, check_protocol, read_shapes
from penstock.terminal.output import make_console, print_rows
from penstock.terminal.repository_options import ServedModels
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.experiments.tuning.model import TuneModel
    from penstock.experiments.tuning.record import TuneRecord
    from penstock.experiments.tuning.tune import ReportProgress, TuneProgress

OUT = Path("bench-out/tune")
DEFAULT_CONCURRENCY = 32
MINUTES, QUICK_MINUTES = 6.0, 2.0
WINDOW_S, QUICK_WINDOW_S = 2.0, 1.0
WARM_UP = 0.3  # warm-up time as a share of a window


def tune(
    model: Annotated[str, typer.Argument(help="Name of a model in the repository, or the path of its folder.")],
    p99_ms: Annotated[float | None, typer.Option(min=0.001, help="Maximum p99 latency in ms. [default: none]")] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(
            help="Minimum accuracy compared with the original in FP32. [default: 0.98; task score 0.95; upscale 40 dB]"
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Do not change: engine (with precision), instances, batching or delay; may be repeated. "
            "[default: none]"
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Concurrent callers. [default: 32; fewer for a model that takes seconds]"),
    ] = None,
    protocol: LoadProtocol = "grpc",
    data: Annotated[
        str,
        typer.Option(
            metavar="KIND|PATH",
            help="Test data: mixed, queries, passages, pairs, photos or tensor; or a file with one text per line, or a "
            "folder of images; auto: what fits the model.",
        ),
    ] = "auto",
    batch_size: BatchSize = 1,
    shape: Shapes = None,
    minutes: Annotated[float | None, typer.Option(min=0.1, max=600, help="Minutes to measure. [default: 6]")] = None,
    window: Annotated[
        float | None, typer.Option(min=0.1, max=60, help="Length of a measuring window in seconds. [default: 2]")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for 2 minutes with short windows: fewer settings, less precision.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the report but do not change the model.")] = False,
    models: ServedModels = None,
    output: Annotated[Path, typer.Option(help="Folder for reports; each model gets a subfolder.")] = OUT,
    as_json: AsJson = False,
) -> None:
    """Find the fastest settings and write them to model.yaml.

    Tries engines, precisions, numbers of instances and threads, and batching.
    """
    from penstock.experiments.load.choice import LoadData
    from penstock.experiments.tuning.servers import TuneLoad
    from penstock.experiments.tuning.tune import KEPT, TuneOptions, tune_model

    check_protocol(protocol)
    if unknown := sorted(set(keep or ()) - set(KEPT)):
        raise InvalidRequest(f"--keep {unknown[0]}: choose from {', '.join(KEPT)}")
    window_s = window or (QUICK_WINDOW_S if quick else WINDOW_S)
    load = TuneLoad(
        protocol, concurrency or DEFAULT_CONCURRENCY, batch_size, window_s, WARM_UP * window_s, concurrency is None
    )
    options = TuneOptions(
        minutes or (QUICK_MINUTES if quick else MINUTES),
        p99_ms,
        min_accuracy,
        tuple(keep or ()),
        load,
        LoadData(data, batch_size, read_shapes(shape)),
    )
    found = _find_model(model, models, output)
    folder = output / found.folder.name
    with raise_on_signals(), _show_progress(as_json) as report:
        record = tune_model(found, options, folder, report, dry_run)
    if as_json:
        print(record.model_dump_json(indent=2))
    else:
        _print_summary(record, folder)


def _find_model(model: str, models: Path | None, output: Path) -> "TuneModel":
    from penstock.experiments.tuning.model import TuneModel
    from penstock.experiments.variants import Variants

    served = find_folder(model, models)
    return TuneModel(served, Variants(served.path.parent, output / "variants"))


@contextmanager
def _show_progress(as_json: bool) -> "Iterator[ReportProgress]":
    """Show a progress bar on a terminal, or print a line for each step to standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or as_json:
        yield lambda progress: print(_format_line(progress), file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=1.0)
        best = ""

        def report(progress: "TuneProgress") -> None:
            nonlocal best
            bar.update(task, description=progress.stage or None, completed=progress.done or None)
            bar.console.print(f"  {progress.text}", highlight=False, markup=False)
            if progress.best and progress.best != best:
                best = progress.best
                bar.console.print(f"best so far: {best}", highlight=False, markup=False, style="bold")

        yield report


def _format_line(progress: "TuneProgress") -> str:
    return f"{progress.stage}: {progress.text} [{progress.done:.0%}]" if progress.stage else progress.text


def _print_summary(record: "TuneRecord", folder: Path) -> None:
    from penstock.experiments.tuning.tune import REPORT
    from penstock.experiments.tuning.tuning_report import explain, verdict

    console = make_console()
    rows = []
    for final in record.finals:
        roles = [("winner", record.winner), ("shipped", record.shipped)]
        role = ", ".join(name for name, configuration in roles if configuration == final.configuration)
        figures = (f"{final.rate:.1f}", f"{final.p99_ms:.1f}", f"{final.over_shipped:.3f}")
        rows.append((final.configuration, *figures, role))
    print_rows(("finalist", "items/s", "p99 ms", "vs shipped", ""), rows, "nothing was measured")
    console.print(verdict(record), markup=False)
    for reason in explain(record):
        console.print(f"  {reason}", markup=False)
    if record.applied:
        console.print(record.applied.diff, markup=False)
    elif not record.is_shipped_best:
        console.print("Not written (dry run).")
    console.print(str(folder / REPORT), markup=False, soft_wrap=True)
