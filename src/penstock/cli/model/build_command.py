"""`penstock model build`: build TensorRT engines before workers load the models."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import ConfigError
from penstock.terminal.output import print_json
from penstock.terminal.progress import show_steps
from penstock.terminal.repository_options import MODELS, Repository
from penstock.terminal.role_options import ConfigFile
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.models.engine_prebuild import PrebuiltEngine
    from penstock.models.folder import ModelFolder


def build(
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a model in the repository, or the path of its folder. "
            "[default: all models with engine: tensorrt]"
        ),
    ] = "",
    repository: Repository = MODELS,
    version: Annotated[str, typer.Option(metavar="N", help="Version to build. [default: the served versions]")] = "",
    force: Annotated[bool, typer.Option("--force", help="Rebuild engines that exist.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="The server's data folder, which stores the engines. [default: ./penstock-data]")
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Build the TensorRT engines of models in advance.

    Workers can then load models with `engine: tensorrt` at once.
    """
    from penstock.core.config import load_config
    from penstock.engines.engine_protocols import EngineHome
    from penstock.models.engine_prebuild import prebuild_engines

    settings = load_config(config, data_dir=data_dir)
    home = EngineHome(settings.data_dir, settings.worker.engine_cache_bytes)
    rows = []
    for folder, each in _find_wanted(model, repository, version):
        with show_steps(f"building {folder.name} {each}"):
            found = [
                _describe_build(folder.name, done) for done in prebuild_engines(folder, each, home, is_forced=force)
            ]
        rows += found
        for row in found if not as_json else ():
            _print_row(row)
    if as_json:
        print_json(rows)


def _find_wanted(model: str, repository: Path, version: str) -> "Iterator[tuple[ModelFolder, str]]":
    from penstock.models.engine_prebuild import can_prebuild
    from penstock.models.folder import find_model, list_model_folders, read_model_folder

    if model:
        folder = read_model_folder(find_model(repository, model))
        if version and not (folder.path / version).is_dir():
            raise ConfigError(f"{folder.path}: has no version {version}")
        yield from ((folder, each) for each in ([version] if version else folder.versions))
        return
    folders = [read_model_folder(path) for path in list_model_folders(repository)]
    found = [(each, number) for each in folders for number in each.versions if can_prebuild(each.settings_of(number))]
    if not found:
        raise ConfigError(f"{repository}: no model has engine: tensorrt; other engines need no build")
    yield from found


def _describe_build(model: str, done: "PrebuiltEngine") -> dict[str, Any]:
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
    how = f"built in {row['build_s']:.1f} s" if row["is_built"] else "exists"
    where = "all GPUs that it supports" if row["device"] == "any" else row["device"]
    count = len(row["profiles"])
    print(
        f"{row['model']} version {row['version']}, {row['network']}: "
        f"{row['file'] or 'an engine that could not be stored'} {how}, "
        f"{row['size_bytes'] / 1e6:.1f} MB, {row['precision']}, {count} profile{'' if count == 1 else 's'}, "
        f"by {row['library']} {row['library_version']} for {where}"
    )
