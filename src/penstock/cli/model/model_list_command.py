"""`penstock model list`: list the models of a repository or a registry."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.core.errors import ConfigError, InvalidRequest, Unavailable
from penstock.terminal.manager_options import takes_manager_options
from penstock.terminal.output import escape_controls, print_json, print_rows
from penstock.terminal.repository_options import MODELS
from penstock.terminal.server_options import Server
from penstock.terminal.shared_options import AsJson


@takes_manager_options
def list_models(
    server: Server,
    repository: Annotated[
        Path | None,
        typer.Option("--repository", "-r", help="Folder with the models. [default: the server's folder, or ./models]"),
    ] = None,
    registry: Annotated[
        bool,
        typer.Option("--registry", help="List the models of a server's registry instead."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the models of a folder, with their states at the server.

    Without a server, the states are left out.
    """
    if registry:
        from penstock.features.registry.registry_commands import list_registry

        list_registry(server, as_json)
        return
    states = _find_states(server)
    folder = repository or Path((states is not None and server.models) or MODELS)
    try:
        rows = [_describe_folder(path) for path in find_folders(folder)]
    except ConfigError as error:
        raise ConfigError(f"{error.message}; give the repository with --repository") from error
    if states is not None:
        rows = list(_add_states(rows, states))
    if as_json:
        print_json(rows)
        return
    titles = ("model", "versions", "state", "task", "engine", "precision")
    shown = [{**row, "versions": ", ".join(row.get("versions", ()))} for row in rows]
    nothing = f"no models in {folder}: a model is a folder with a model.yaml"
    print_rows(titles, [[row.get(title, "") for title in titles] for row in shown], nothing)
    for row in rows:
        if problem := row.get("problem"):
            print(escape_controls(f"{row['model']}: {problem}"))


def _find_states(server: Server) -> dict[str, tuple[str, str]] | None:
    """Return the states of the server's models, or None if no server was named and none runs in this folder."""
    from penstock.features.admin.model_commands import list_states

    try:
        return list_states(server)
    except (InvalidRequest, Unavailable):
        if server.is_named:
            raise
        return None


def _add_states(rows: list[dict[str, Any]], states: dict[str, tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Add the states, and rows for the server's models that are not in the folder."""
    from penstock.features.admin.model_commands import NOT_DEPLOYED

    for row in rows:
        state, reason = states.get(row["model"], (NOT_DEPLOYED, ""))
        if state == NOT_DEPLOYED and "problem" not in row:
            reason = f"`penstock model load {row['model']}` deploys it"
        yield {**row, "state": state, **({"problem": reason} if reason and "problem" not in row else {})}
    known = {row["model"] for row in rows}
    for model, (state, reason) in states.items():
        if model not in known:
            yield {"model": model, "state": state, **({"problem": reason} if reason else {})}


def find_folders(repository: Path) -> list[Path]:
    """Return the folders of models, and folders that look like a model but have no model.yaml."""
    from penstock.models.check.layout import looks_like_a_model
    from penstock.models.folder import list_model_folders

    models = list_model_folders(repository)
    others = [child for child in repository.iterdir() if child.is_dir() and not child.name.startswith(".")]
    return sorted({*models, *(child for child in others if child not in models and looks_like_a_model(child))})


def _describe_folder(path: Path) -> dict[str, Any]:
    from penstock.models.folder import is_model, read_model_folder

    if not is_model(path):
        return {"model": path.name, "problem": f"has no model.yaml: create {path / 'model.yaml'}, which may be empty"}
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
