"""`penstock tune`: the fastest settings of a model on this machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frames import find_folder
from penstock.cli.terminal.interrupts import interruptible
from penstock.cli.terminal.load import BatchSize, LoadProtocol, Shapes, check_protocol, read_shapes
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import make_console
from penstock.cli.terminal.repository import ServedModels
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.experiments.tuning.model import TuneModel
    from penstock.experiments.tuning.record import TuneRecord
    from penstock.experiments.tuning.tune import Tell, TuneProgress

OUT = Path("bench-out/tune")
CALLERS = 32
MINUTES, QUICK_MINUTES = 6.0, 2.0
WINDOW_S, QUICK_WINDOW_S = 2.0, 1.0
WARM_UP = 0.3  # of a window


def tune(
    model: Annotated[str, typer.Argument(help="A model of the repository, or its folder.")],
    p99_ms: Annotated[float | None, typer.Option(min=0.001, help="The p99 latency to stay within, in ms.")] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(help="Against the original in FP32; [default: as penstock model quantize has it for the task]"),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Leave it as it is: engine (and precision), instances, batching or delay; may repeat."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Callers of the load. [default: 32, fewer for a model that takes seconds]"),
    ] = None,
    protocol: LoadProtocol = "grpc",
    data: Annotated[
        str,
        typer.Option(
            metavar="KIND|PATH",
            help="mixed, queries, passages, pairs, photos, tensor; or your own: a file of texts, one a line, or a "
            "folder of images. [default: what fits the model]",
        ),
    ] = "auto",
    batch_size: BatchSize = 1,
    shape: Shapes = None,
    minutes: Annotated[float | None, typer.Option(min=0.1, max=600, help="Of measuring. [default: 6]")] = None,
    window: Annotated[float | None, typer.Option(min=0.1, max=60, help="Seconds of a window. [default: 2]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two minutes of short windows: less is tried and seen.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report, and leave the model as it is.")] = False,
    models: ServedModels = None,
    output: Annotated[Path, typer.Option(help="Where reports go, in a folder for each model.")] = OUT,
    as_json: AsJson = False,
) -> None:
    """Search engine, precision, instances, threads and batching for the most throughput, and write the winner."""
    from penstock.experiments.tuning.data import TuneData
    from penstock.experiments.tuning.servers import TuneLoad
    from penstock.experiments.tuning.tune import KEPT, TuneOptions, tune_model

    check_protocol(protocol)
    if unknown := sorted(set(keep or ()) - set(KEPT)):
        raise InvalidRequest(f"--keep {unknown[0]}: there are {', '.join(KEPT)}")
    window_s = window or (QUICK_WINDOW_S if quick else WINDOW_S)
    load = TuneLoad(protocol, concurrency or CALLERS, batch_size, window_s, WARM_UP * window_s, concurrency is None)
    options = TuneOptions(
        minutes or (QUICK_MINUTES if quick else MINUTES),
        p99_ms,
        min_accuracy,
        tuple(keep or ()),
        load,
        TuneData(data, batch_size, read_shapes(shape)),
    )
    found = _find(model, models, output)
    folder = output / found.folder.name
    with interruptible(), _progress(as_json) as tell:
        record = tune_model(found, options, folder, tell, dry_run)
    if as_json:
        print(record.model_dump_json(indent=2))
    else:
        _print(record, folder)


def _find(model: str, models: Path | None, output: Path) -> "TuneModel":
    from penstock.experiments.tuning.model import TuneModel
    from penstock.experiments.variants import Variants

    served = find_folder(model, models)
    return TuneModel(served, Variants(served.path.parent, output / "variants"))


@contextmanager
def _progress(as_json: bool) -> "Iterator[Tell]":
    """A bar for people; else a line for each thing that happens, on standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or as_json:
        yield lambda progress: print(_line(progress), file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=1.0)
        best = ""

        def tell(progress: "TuneProgress") -> None:
            nonlocal best
            bar.update(task, description=progress.stage or None, completed=progress.done or None)
            bar.console.print(f"  {progress.text}", highlight=False, markup=False)
            if progress.best and progress.best != best:
                best = progress.best
                bar.console.print(f"best so far: {best}", highlight=False, markup=False, style="bold")

        yield tell


def _line(progress: "TuneProgress") -> str:
    return f"{progress.stage}: {progress.text} [{progress.done:.0%}]" if progress.stage else progress.text


def _print(record: "TuneRecord", folder: Path) -> None:
    from rich.table import Table

    from penstock.experiments.tuning.report import verdict
    from penstock.experiments.tuning.tune import REPORT

    console = make_console()
    table = Table("finalist", "items/s", "p99 ms", "over shipped", "")
    for final in record.finals:
        roles = [("winner", record.winner), ("shipped", record.shipped)]
        role = ", ".join(name for name, configuration in roles if configuration == final.configuration)
        figures = (f"{final.rate:.1f}", f"{final.p99_ms:.1f}", f"{final.over_shipped:.3f}")
        table.add_row(str(final.configuration), *figures, role)
    console.print(table)
    console.print(verdict(record), markup=False)
    if record.applied:
        console.print(record.applied.diff, markup=False)
    elif not record.is_shipped_best:
        console.print("Not written: this was a dry run.")
    console.print(str(folder / REPORT), markup=False, soft_wrap=True)
