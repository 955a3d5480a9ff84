"""The model repository that a command works on."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import ConfigError

MODELS = Path("models")

Repository = Annotated[Path, typer.Option("--repository", "-r", help="The model repository.")]
ServedModels = Annotated[
    Path | None,
    typer.Option("--models", help="The model repository. [default: ./models, or the packaged models]"),
]


def list_folders(repository: Path) -> list[Path]:
    from penstock.models.folder import list_model_folders

    try:
        return list_model_folders(repository)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; say where yours is") from error


def find_repository(models: Path | None) -> Path:
    """The repository that `penstock serve` would serve."""
    from penstock.cli.terminal.progress import show_steps
    from penstock.core.config import load_config
    from penstock.models.default_models import with_default_models

    return with_default_models(load_config(models=models), show_steps).config.models
