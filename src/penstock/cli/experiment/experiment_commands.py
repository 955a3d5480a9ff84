"""`penstock experiment run`, `run-all`, `compare` and `list`: measure variants of a model and compare the results."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import ConfigError
from penstock.terminal.interrupts import raise_on_signals
from penstock.terminal.load import MsMarco
from penstock.terminal.output import make_console, print_json, print_rows
from penstock.terminal.repository_options import ServedModels, find_repository
from penstock.terminal.request_sender import exit_with_problems
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.experiments.compare import Comparison
    from penstock.experiments.results import Results
    from penstock.experiments.runner import RunOptions
    from penstock.experiments.variants import Variants

Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CASE",
        help="Run only this case; wildcards such as `*int8*` are allowed; may be repeated. [default: all]",
    ),
]
Repeats = Annotated[
    int | None, typer.Option(min=1, max=100, help="Repeats of each case. [default: the experiment's setting]")
]
Quick = Annotated[bool, typer.Option("--quick", help="Use short windows: a trial run whose figures are not reliable.")]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--fresh",
        help="Continue from existing results, or start over. [default: continue if nothing has changed]",
    ),
]
IS_WORSE = 1
EXPERIMENTS = Path("experiments")
OUT = Path("bench-out/experiments")
Folder = Annotated[Path, typer.Argument(help="A folder of experiment files.")]
Out = Annotated[Path, typer.Option(help="Folder for results; each experiment gets a subfolder.")]


def find_variants(models: Path | None, out: Path) -> "Variants":
    from penstock.experiments.variants import Variants

    return Variants(find_repository(models), out / "variants")


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
    """Run an experiment and write a report.

    Starts servers and measures every case.
    """
    from penstock.experiments.runner import RunOptions

    options = RunOptions(tuple(only or ()), repeats, quick, msmarco, resume)
    with raise_on_signals():
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
    """Run every experiment in a folder, one after another.

    An invalid experiment is reported, and the other experiments still run.
    """
    from penstock.experiments.experiment_file import find_experiments
    from penstock.experiments.runner import RunOptions

    options = RunOptions((), repeats, quick, msmarco, resume)
    variants = find_variants(models, out)
    failed: list[str] = []
    with raise_on_signals():
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
    if not any(repeat.answered for result in results.cases for repeat in result.repeats):
        raise ConfigError(f"{file}: no case has an answer; the reasons are above and in {folder / REPORT}")


def _print_results(results: "Results") -> None:
    from penstock.experiments.table import measured, not_run, number, share, units

    unit = units(results)
    has_text = any(result.text_repeats for result in results.cases)
    text = ("first token\np50 ms", "between\np50 ms") if has_text else ()
    titles = ("case", "requests/s", f"{unit}/s", "±", *text, "p50 ms", "p99 ms", "p99 ±", "CPU %", "MiB", "steady")
    rows = []
    for result in measured(results):
        latencies = [number(result.latency(name).mean) for name in ("p50", "p99")]
        if has_text:
            latencies = [
                number(each.mean) for each in (result.first_token("p50"), result.between_tokens("p50"))
            ] + latencies
        rates = [number(result.rps.mean), number(result.items_per_s.mean), share(result.items_per_s)]
        use = [number(result.cpu_percent.mean), number(result.memory_mib.mean), "yes" if result.is_steady else "no"]
        rows.append((result.case.id, *rates, *latencies, share(result.latency("p99")), *use))
    print_rows(titles, rows, "no case was measured")
    console = make_console()
    for variant, loads, why in not_run(results):
        console.print(f"not run: {variant} ({loads}): {why}", markup=False)


def compare(
    a: Annotated[Path, typer.Argument(help="Results A: a folder, its results.json, or an experiment's name.")],
    b: Annotated[Path, typer.Argument(help="Results B, which are compared with A.")],
    out: Out = OUT,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    fail_on_worse: Annotated[
        bool, typer.Option("--fail-on-worse", help="Exit with status 1 if B is worse than A beyond the noise.")
    ] = False,
) -> None:
    """Compare two results case by case. Differences within the noise between repeats do not count."""
    from penstock.experiments import compare as comparing
    from penstock.experiments.results import read_results

    found = comparing.compare(*(read_results(path if path.exists() else out / path) for path in (a, b)))
    if as_json:
        print_json(found.to_json())
    elif markdown:
        print(comparing.to_markdown(found), end="")
    else:
        _print_comparison(found)
    if fail_on_worse and found.has_worse:
        sys.exit(IS_WORSE)


def _print_comparison(comparison: "Comparison") -> None:
    from penstock.experiments.compare import list_headers, list_rows

    console = make_console()
    console.print(f"{comparison.names[0]} (A) and {comparison.names[1]} (B)", markup=False)
    for difference in comparison.differences:
        console.print(f"differs: {difference}", markup=False)
    print_rows(list_headers(comparison), list_rows(comparison), "no case was measured in both")
    for name, cases in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if cases:
            console.print(f"measured only in {name}: {', '.join(cases)}", markup=False)
    console.print(comparison.rule, markup=False)


def list_experiments(folder: Folder = EXPERIMENTS, models: ServedModels = None, as_json: AsJson = False) -> None:
    """List the experiments in a folder.

    Also shows how many of their cases this machine can run.
    """
    from penstock.experiments.experiment_file import find_experiments

    variants = find_variants(models, OUT)
    rows = [_describe_experiment(file, variants) for file in find_experiments(folder)]
    if as_json:
        print_json(rows)
        return
    shown = [[row.get(key, "") for key in ("experiment", "cases", "run_here", "description")] for row in rows]
    print_rows(("experiment", "cases", "run here", "description"), shown, f"no experiments in {folder}")


def _describe_experiment(file: Path, variants: "Variants") -> dict[str, object]:
    from penstock.experiments.experiment import expand
    from penstock.experiments.experiment_file import read_experiment

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
