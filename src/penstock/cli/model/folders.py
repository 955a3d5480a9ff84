"""Where the commands for models look for them."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import ConfigError

Repository = Annotated[Path, typer.Option("--repository", "-r", help="The model repository.")]
MODELS = Path("models")


def folders(repository: Path) -> list[Path]:
    from penstock.models.folder import list_model_folders

    try:
        return list_model_folders(repository)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; say where yours is") from error
