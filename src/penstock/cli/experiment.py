"""`penstock experiment`: run, run-all, compare, list."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.interrupts import interruptible
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.repository import ServedModels, find_repository
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.experiments.compare import Comparison
    from penstock.experiments.results import Results
    from penstock.experiments.runner import RunOptions
    from penstock.experiments.variants import Variants

app = typer.Typer(no_args_is_help=True, help="Experiments: measure variants of a model and compare them.")

EXPERIMENTS = Path("experiments")
OUT = Path("bench-out/experiments")

Folder = Annotated[Path, typer.Argument(help="A folder of experiment files.")]
Out = Annotated[Path, typer.Option(help="Where results go, in a folder for each experiment.")]
Only = Annotated[list[str] | None, typer.Option(metavar="CASE", help="This case, or those like '*int8*'; may repeat.")]
Repeats = Annotated[int | None, typer.Option(min=1, max=100, help="In place of the experiment's own.")]
Quick = Annotated[bool, typer.Option("--quick", help="Short windows: to try an experiment, not to believe it.")]
MsMarco = Annotated[Path | None, typer.Option(help="Texts from MS MARCO at this path: TSV or Parquet.")]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--fresh",
        help="Go on with the results that are there, or start over. [default: go on, where nothing has changed]",
    ),
]


@app.command()
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
        _run_file(file, out, _variants(models, out), options)


@app.command("run-all")
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
    variants = _variants(models, out)
    failed: list[str] = []
    with interruptible():
        for file in find_experiments(folder):
            try:
                _run_file(file, out, variants, options)
            except ConfigError as error:
                failed.append(error.message)
    for message in failed:
        print(f"penstock: {message}", file=sys.stderr)
    if failed:
        sys.exit(2)


@app.command("compare")
def compare_results(
    a: Annotated[Path, typer.Argument(help="Results: a folder, its results.json, or an experiment's name.")],
    b: Annotated[Path, typer.Argument(help="The results to hold against them.")],
    out: Out = OUT,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    fail_on_worse: Annotated[
        bool, typer.Option("--fail-on-worse", help="Exit with 1 where B is worse than A beyond the noise.")
    ] = False,
) -> None:
    """Compare two results case by case; a difference within the noise between repeats is not called one."""
    from penstock.experiments.compare import compare, to_markdown
    from penstock.experiments.results import read_results

    found = compare(*(read_results(_place(path, out)) for path in (a, b)))
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif markdown:
        print(to_markdown(found), end="")
    else:
        _print_comparison(found)
    if fail_on_worse and found.has_worse:
        sys.exit(1)


@app.command("list")
def list_experiments(folder: Folder = EXPERIMENTS, models: ServedModels = None, as_json: AsJson = False) -> None:
    """Show the experiments of a folder, and how many of their cases this machine can run."""
    from penstock.experiments.file import find_experiments

    variants = _variants(models, OUT)
    rows = [_describe(file, variants) for file in find_experiments(folder)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "cases", "run here", "description")
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in ("experiment", "cases", "run_here", "description")))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _describe(file: Path, variants: "Variants") -> dict[str, object]:
    from penstock.experiments.experiment import expand
    from penstock.experiments.file import read_experiment

    try:
        experiment = read_experiment(file)
        cases = expand(experiment, variants.engine_of, variants.data_of)
    except ConfigError as error:
        return {"experiment": file.stem, "file": str(file), "description": error.message}
    return {
        "experiment": experiment.name,
        "file": str(file),
        "description": experiment.description,
        "cases": len(cases),
        "run_here": sum(variants.why_not(case) is None for case in cases),
    }


def _run_file(file: Path, out: Path, variants: "Variants", options: "RunOptions") -> None:
    from penstock.experiments.file import read_experiment
    from penstock.experiments.results import FILE, read_results
    from penstock.experiments.runner import ExperimentRunner

    experiment = read_experiment(file)
    # Short windows beside the long ones: a trial must not displace results to believe.
    folder = out / (f"{experiment.name}-quick" if options.is_quick else experiment.name)
    try:
        results = ExperimentRunner(experiment, variants, folder, options, _tell).run()
    except KeyboardInterrupt:
        if (folder / FILE).is_file():
            _write_reports(read_results(folder), folder)
            _tell(f"interrupted: what was measured is in {folder}; the same command goes on from there")
        raise
    _print_results(results)
    _write_reports(results, folder)
    print(f"{folder / 'report.html'}")


def _write_reports(results: "Results", folder: Path) -> None:
    from penstock.experiments.report import to_html
    from penstock.experiments.table import to_markdown

    (folder / "results.md").write_text(to_markdown(results), encoding="utf-8")
    (folder / "report.html").write_text(to_html(results), encoding="utf-8")


def _variants(models: Path | None, out: Path) -> "Variants":
    from penstock.experiments.variants import Variants

    return Variants(find_repository(models), out / "variants")


def _place(path: Path, out: Path) -> Path:
    return path if path.exists() else out / path


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_results(results: "Results") -> None:
    from rich.console import Console
    from rich.table import Table

    from penstock.experiments.table import measured, not_run, number, share, units

    unit = units(results)
    table = Table("case", "requests/s", f"{unit}/s", "±", "p50 ms", "p99 ms", "p99 ±", "CPU %", "MiB", "steady")
    for result in measured(results):
        latencies = [number(result.latency(name).mean) for name in ("p50", "p99")]
        rates = [number(result.rps.mean), number(result.items_per_s.mean), share(result.rps)]
        use = [number(result.cpu_percent.mean), number(result.memory_mib.mean), "yes" if result.is_steady else "no"]
        table.add_row(result.case.id, *rates, *latencies, share(result.latency("p99")), *use)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for variant, loads, why in not_run(results):
        console.print(f"not run: {variant} ({loads}): {why}", highlight=False, markup=False)


def _print_comparison(found: "Comparison") -> None:
    from rich.console import Console
    from rich.table import Table

    from penstock.experiments.compare import HEADERS, rows

    console = Console(width=None if sys.stdout.isatty() else 180)
    colours = {"better": "green", "worse": "red"}
    for difference in found.differences:
        console.print(f"not the same: {difference}", highlight=False, markup=False)
    table = Table(*HEADERS, title=f"{found.names[0]} (A) and {found.names[1]} (B)")
    for row in rows(found):
        table.add_row(*(f"[{colours[cell]}]{cell}[/]" if cell in colours else cell for cell in row))
    console.print(table)
    for name, cases in (("A", found.only_in_a), ("B", found.only_in_b)):
        if cases:
            console.print(f"measured in {name} alone: {', '.join(cases)}", highlight=False, markup=False)
    console.print(found.rule, highlight=False, markup=False)
