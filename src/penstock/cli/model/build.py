"""`penstock model build`: engines for GPUs, before anybody waits for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.cluster import ConfigFile
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json
from penstock.cli.terminal.progress import show_steps
from penstock.cli.terminal.repository import MODELS, Repository
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.models.ahead import BuiltAhead
    from penstock.models.folder import ModelFolder


def build(
    model: Annotated[
        str, typer.Argument(help="A model's name in the repository. [default: all with engine: tensorrt]")
    ] = "",
    repository: Repository = MODELS,
    version: Annotated[str, typer.Option(metavar="N", help="Which. [default: those that are served]")] = "",
    force: Annotated[bool, typer.Option("--force", help="Build also what is there.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="The server's, where engines are kept.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Build the engines of models with engine: tensorrt, so that workers find them when they load the models."""
    from penstock.core.config import load_config
    from penstock.engines.base import EngineHome
    from penstock.models.ahead import build_ahead

    settings = load_config(config, data_dir=data_dir)
    home = EngineHome(settings.data_dir, settings.worker.engine_cache_bytes)
    rows = []
    for folder, each in _wanted(model, repository, version):
        with show_steps(f"building {folder.name} {each}"):
            found = [_describe(folder.name, done) for done in build_ahead(folder, each, home, is_forced=force)]
        rows += found
        for row in found if not as_json else ():
            _print_row(row)
    if as_json:
        print_json(rows)


def _wanted(model: str, repository: Path, version: str) -> "Iterator[tuple[ModelFolder, str]]":
    from penstock.models.ahead import is_built_ahead
    from penstock.models.folder import find_model, list_model_folders, read_model_folder

    if model:
        folder = read_model_folder(find_model(repository, model))
        if version and not (folder.path / version).is_dir():
            raise ConfigError(f"{folder.path}: has no version {version}")
        yield from ((folder, each) for each in ([version] if version else folder.versions))
        return
    folders = [read_model_folder(path) for path in list_model_folders(repository)]
    found = [(each, number) for each in folders for number in each.versions if is_built_ahead(each.settings_of(number))]
    if not found:
        raise ConfigError(f"{repository}: no model has engine: tensorrt, and for others nothing is built ahead")
    yield from found


def _describe(model: str, done: "BuiltAhead") -> dict[str, Any]:
    plan, built = done.plan, done.built
    return {
        "model": model,
        "version": done.version,
        "network": plan.file.name,
        "library": plan.library.name,
        "library_version": plan.library.version,
        "device": plan.device,
        "precision": plan.precision,
        "profiles": [
            {name: dict(zip(("min", "opt", "max"), map(list, shapes), strict=True)) for name, shapes in each.items()}
            for each in plan.profiles
        ],
        "file": built.name,
        "size_bytes": built.size_bytes,
        "is_built": built.is_new,
        "build_s": round(built.build_s, 3),
    }


def _print_row(row: dict[str, Any]) -> None:
    how = f"built in {row['build_s']:.1f} s" if row["is_built"] else "was there"
    where = "GPUs that it knows" if row["device"] == "any" else row["device"]
    count = len(row["profiles"])
    print(
        f"{row['model']} version {row['version']}, {row['network']}: "
        f"{row['file'] or 'an engine that could not be kept'} {how}, "
        f"{row['size_bytes'] / 1e6:.1f} MB, {row['precision']}, {count} profile{'' if count == 1 else 's'}, "
        f"by {row['library']} {row['library_version']} for {where}"
    )
