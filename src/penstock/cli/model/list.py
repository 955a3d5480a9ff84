"""`penstock model list`: a repository's models, or a registry's."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.cluster.asking import Asked, asks
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json, print_rows
from penstock.cli.terminal.repository import MODELS, Repository
from penstock.core.errors import ConfigError


@asks
def list_models(
    asked: Asked,
    repository: Repository = MODELS,
    registry: Annotated[
        bool, typer.Option("--registry", help="The models of a cluster's registry; so also with --manager or --config.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the models of a repository, and what is wrong with those that cannot be served; or those of a registry."""
    if registry or asked.manager or asked.config:
        from penstock.cli.model.registry import list_registry

        list_registry(asked, as_json)
        return
    from penstock.models.folder import list_model_folders

    try:
        rows = [_describe(path) for path in list_model_folders(repository)]
    except ConfigError as error:
        raise ConfigError(f"{error.message}; say where yours is") from error
    if as_json:
        print_json(rows)
        return
    titles = ("model", "versions", "task", "engine", "precision", "problem")
    shown = [{**row, "versions": ", ".join(row.get("versions", ()))} for row in rows]
    nothing = f"{repository} has no models: a model is a folder with a model.yaml"
    print_rows(titles, [[row.get(title, "") for title in titles] for row in shown], nothing)


def _describe(path: Path) -> dict[str, Any]:
    from penstock.models.folder import read_model_folder

    try:
        folder = read_model_folder(path)
        settings = folder.settings_of(folder.versions[-1])
    except ConfigError as error:
        return {"model": path.name, "problem": error.message}
    return {
        "model": folder.name,
        "versions": list(folder.versions),
        "task": settings.task,
        "engine": settings.engine,
        "precision": settings.precision,
        "description": settings.description,
    }
