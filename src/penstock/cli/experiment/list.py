"""`penstock experiment list`: a folder's experiments."""

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.experiment.options import EXPERIMENTS, OUT, Folder, find_variants
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import make_console, print_json
from penstock.cli.terminal.repository import ServedModels
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.experiments.variants import Variants


def list_experiments(folder: Folder = EXPERIMENTS, models: ServedModels = None, as_json: AsJson = False) -> None:
    """Show the experiments of a folder, and how many of their cases this machine can run."""
    from penstock.experiments.file import find_experiments

    variants = find_variants(models, OUT)
    rows = [_describe(file, variants) for file in find_experiments(folder)]
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table("experiment", "cases", "run here", "description")
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in ("experiment", "cases", "run_here", "description")))
    make_console().print(table)


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
