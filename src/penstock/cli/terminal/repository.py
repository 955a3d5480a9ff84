"""The model repository that a command works on."""

from pathlib import Path
from typing import Annotated

import typer

MODELS = Path("models")

Repository = Annotated[Path, typer.Option("--repository", "-r", help="The model repository.")]
ServedModels = Annotated[
    Path | None,
    typer.Option("--models", help="The model repository. [default: ./models, or the packaged models]"),
]


def find_repository(models: Path | None) -> Path:
    """The repository that `penstock serve` would serve."""
    from penstock.cli.terminal.progress import show_steps
    from penstock.core.config import load_config
    from penstock.models.default_models import with_default_models

    return with_default_models(load_config(models=models), show_steps).config.models
