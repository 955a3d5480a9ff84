"""`penstock experiment run` and `run-all`: servers are started, cases measured, reports written."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.experiment.options import EXPERIMENTS, OUT, Folder, Out, find_variants
from penstock.cli.terminal.interrupts import interruptible
from penstock.cli.terminal.load import MsMarco
from penstock.cli.terminal.output import make_console
from penstock.cli.terminal.repository import ServedModels
from penstock.cli.terminal.requests import exit_with_problems
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.experiments.results import Results
    from penstock.experiments.runner import RunOptions
    from penstock.experiments.variants import Variants

Only = Annotated[list[str] | None, typer.Option(metavar="CASE", help="This case, or those like '*int8*'; may repeat.")]
Repeats = Annotated[int | None, typer.Option(min=1, max=100, help="In place of the experiment's own.")]
Quick = Annotated[bool, typer.Option("--quick", help="Short windows: to try an experiment, not to believe it.")]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--fresh",
        help="Go on with the results that are there, or start over. [default: go on, where nothing has changed]",
    ),
]


def run(
    file: Annotated[Path, typer.Argument(help="The experiment's YAML file.")],
    out: Out = OUT,
    models: ServedModels = None,
    only: Only = None,
    repeats: Repeats = None,
    quick: Quick = False,
    msmarco: MsMarco = None,
    resume: Resume = None,
) -> None:
    """Run one experiment: start servers, measure every case, write the report."""
    from penstock.experiments.runner import RunOptions

    options = RunOptions(tuple(only or ()), repeats, quick, msmarco, resume)
    with interruptible():
        _run_file(file, out, find_variants(models, out), options)


def run_all(
    folder: Folder = EXPERIMENTS,
    out: Out = OUT,
    models: ServedModels = None,
    repeats: Repeats = None,
    quick: Quick = False,
    msmarco: MsMarco = None,
    resume: Resume = None,
) -> None:
    """Run every experiment of a folder, one after another; one that is wrong does not stop the others."""
    from penstock.experiments.file import find_experiments
    from penstock.experiments.runner import RunOptions

    options = RunOptions((), repeats, quick, msmarco, resume)
    variants = find_variants(models, out)
    failed: list[str] = []
    with interruptible():
        for file in find_experiments(folder):
            try:
                _run_file(file, out, variants, options)
            except ConfigError as error:
                failed.append(error.message)
    exit_with_problems(failed)


def _run_file(file: Path, out: Path, variants: "Variants", options: "RunOptions") -> None:
    from penstock.experiments.runner import REPORT, run_experiment

    results, folder = run_experiment(file, out, variants, options, partial(print, file=sys.stderr, flush=True))
    _print_results(results)
    print(folder / REPORT)


def _print_results(results: "Results") -> None:
    from rich.table import Table

    from penstock.experiments.table import measured, not_run, number, share, units

    unit = units(results)
    has_text = any(result.text_repeats for result in results.cases)
    text = ("first token\np50 ms", "between\np50 ms") if has_text else ()
    table = Table("case", "requests/s", f"{unit}/s", "±", *text, "p50 ms", "p99 ms", "p99 ±", "CPU %", "MiB", "steady")
    for result in measured(results):
        latencies = [number(result.latency(name).mean) for name in ("p50", "p99")]
        if has_text:
            latencies = [
                number(each.mean) for each in (result.first_token("p50"), result.between_tokens("p50"))
            ] + latencies
        rates = [number(result.rps.mean), number(result.items_per_s.mean), share(result.items_per_s)]
        use = [number(result.cpu_percent.mean), number(result.memory_mib.mean), "yes" if result.is_steady else "no"]
        table.add_row(result.case.id, *rates, *latencies, share(result.latency("p99")), *use)
    console = make_console()
    console.print(table)
    for variant, loads, why in not_run(results):
        console.print(f"not run: {variant} ({loads}): {why}", markup=False)
