"""`penstock experiment compare`: two results, case by case."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.experiment.options import OUT, Out
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import make_console, print_json

if TYPE_CHECKING:
    from penstock.experiments.compare import Comparison

COLOURS = {"better": "green", "worse": "red"}
IS_WORSE = 1


def compare(
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
    from penstock.experiments import compare as comparing
    from penstock.experiments.results import read_results

    found = comparing.compare(*(read_results(path if path.exists() else out / path) for path in (a, b)))
    if as_json:
        print_json(found.to_json())
    elif markdown:
        print(comparing.to_markdown(found), end="")
    else:
        _print(found)
    if fail_on_worse and found.has_worse:
        sys.exit(IS_WORSE)


def _print(found: "Comparison") -> None:
    from rich.table import Table

    from penstock.experiments.compare import headers, rows

    console = make_console(180)
    for difference in found.differences:
        console.print(f"not the same: {difference}", markup=False)
    table = Table(*headers(found), title=f"{found.names[0]} (A) and {found.names[1]} (B)")
    for row in rows(found):
        table.add_row(*(f"[{COLOURS[cell]}]{cell}[/]" if cell in COLOURS else cell for cell in row))
    console.print(table)
    for name, cases in (("A", found.only_in_a), ("B", found.only_in_b)):
        if cases:
            console.print(f"measured in {name} alone: {', '.join(cases)}", markup=False)
    console.print(found.rule, markup=False)
