"""Options for the model repository of a command."""

from pathlib import Path
from typing import Annotated

import typer

MODELS = Path("models")

Repository = Annotated[Path, typer.Option("--repository", "-r", help="Folder with the models.")]
ServedModels = Annotated[
    Path | None,
    typer.Option("--models", help="Folder with the models. [default: ./models, or the packaged models]"),
]
Watch = Annotated[
    bool | None,
    typer.Option("--watch", help="Deploy models and versions that are added, changed or removed in the folder."),
]


def find_repository(models: Path | None) -> Path:
    """Return `models` or, by default, the repository that `penstock serve` would serve in this folder."""
    from penstock.core.config import load_config
    from penstock.models.default_models import with_default_models
    from penstock.terminal.progress import show_steps

    return with_default_models(load_config(models=models), show_steps).config.models
