"""What the commands of experiments share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.repository import find_repository

if TYPE_CHECKING:
    from penstock.experiments.variants import Variants

EXPERIMENTS = Path("experiments")
OUT = Path("bench-out/experiments")

Folder = Annotated[Path, typer.Argument(help="A folder of experiment files.")]
Out = Annotated[Path, typer.Option(help="Where results go, in a folder for each experiment.")]


def find_variants(models: Path | None, out: Path) -> "Variants":
    from penstock.experiments.variants import Variants

    return Variants(find_repository(models), out / "variants")
