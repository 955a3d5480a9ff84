"""`penstock model push`, `pull`, `delete` and `alias`: the model registry of a cluster."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.manager_options import print_done, takes_manager_options
from penstock.terminal.output import print_json, print_rows
from penstock.terminal.progress import show_bytes, show_steps
from penstock.terminal.server_options import Server
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.client.registry import ModelVersion, RegistryClient

T = TypeVar("T")
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME[:VERSION|@ALIAS]", help="The model; without a version or an alias, its latest version."
    ),
]


def _with_registry_client(server: Server, act: "Callable[[RegistryClient], Awaitable[T]]") -> T:
    """Run `act` with a client of the registry, and without logs, which would mix with the command's result."""
    import logging

    import structlog

    from penstock.client.registry import RegistryClient

    async def call() -> T:
        async with RegistryClient(",".join(server.managers), channels=server.channels) as client:
            return await act(client)

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        return asyncio.run(call())
    finally:
        structlog.configure(**before)


@takes_manager_options
def push(
    server: Server,
    folder: Annotated[Path, typer.Argument(help="Folder of the model, or its name in ./models.")],
    version: Annotated[str, typer.Option(metavar="N", help="Version to send. [default: the newest served]")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="Additional tag; may be repeated. [default: none]")] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Send the model without loading it first.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for the model to load and answer.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Send a version of a model to the registry.

    Files that the registry has are skipped; interrupted files are continued.
    """
    from penstock.features.registry.manifest import ModelFacts
    from penstock.features.registry.scan import check_facts, scan
    from penstock.models.folder import is_model
    from penstock.terminal.repository_options import MODELS

    folder = folder if folder.exists() or not is_model(MODELS / folder) else MODELS / folder
    folder = folder.absolute()
    with show_steps(f"reading {folder.name}") as report:
        scanned = scan(folder, version, report)
        manifest = scanned.manifest
        facts = ModelFacts()
        if not no_check:
            report("loading the model")
            facts = check_facts(folder, manifest.version, timeout)
    facts = facts.model_copy(update={"tags": (*facts.tags, *(tag or ()))})

    async def send(client: "RegistryClient") -> "ModelVersion":
        with show_bytes(f"{manifest.model}:{manifest.version}", manifest.size_bytes) as on_progress:
            return await client.push(manifest, scanned.files, facts, on_progress)

    made = _with_registry_client(server, send)
    message = (
        f"pushed {made.model}:{made.version}, {_format_size(made.size_bytes)} in {made.files} files, {made.digest}"
    )
    print_done(as_json, message, **_convert_to_json(made))
    server.print_changed()


@takes_manager_options
def pull(
    server: Server,
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Folder of the model; it is created, or the version is added.")],
    as_json: AsJson = False,
) -> None:
    """Download a version of a model from the registry.

    Every file is verified.
    """
    from penstock.features.registry.pull import CountedFiles
    from penstock.features.registry.pull import pull as fetch

    async def get(client: "RegistryClient") -> "ModelVersion":
        found = await client.find(name)
        with show_bytes(f"{found.model}:{found.version}", found.size_bytes) as on_progress:
            await fetch(CountedFiles(client, on_progress), found.digest, found.version, folder.absolute())
        return found

    found = _with_registry_client(server, get)
    message = (
        f"pulled {found.model}:{found.version}, {_format_size(found.size_bytes)} in {found.files} files, into {folder}"
    )
    print_done(as_json, message, **_convert_to_json(found), folder=str(folder))


@takes_manager_options
def delete(
    server: Server,
    name: Annotated[str, typer.Argument(metavar="NAME:VERSION", help="The model and the version to delete.")],
    as_json: AsJson = False,
) -> None:
    """Delete a version from the registry. A version that is deployed or has an alias cannot be deleted."""
    model, version = _split_name(name)
    _with_registry_client(server, lambda client: client.delete(model, version))
    print_done(as_json, f"deleted {name}", deleted=name)
    server.print_changed()


@takes_manager_options
def alias(
    server: Server,
    name: Annotated[str, typer.Argument(metavar="NAME[:VERSION]", help="Without a version, the alias is deleted.")],
    alias: Annotated[str, typer.Argument(help="Name, for example `stable`. `latest` is set automatically.")],
    as_json: AsJson = False,
) -> None:
    """Set an alias such as `stable` to a version of a model."""
    model, version = _split_name(name) if ":" in name else (name, "")
    _with_registry_client(server, lambda client: client.set_alias(model, alias, version))
    message = f"{model}@{alias} is now {model}:{version}" if version else f"deleted the alias {model}@{alias}"
    print_done(as_json, message, model=model, alias=alias, version=version or None)
    server.print_changed()


def list_registry(server: Server, as_json: bool) -> None:
    versions = _with_registry_client(server, lambda client: client.list())
    if as_json:
        print_json([_convert_to_json(each) for each in versions])
        return
    titles = ("model", "version", "aliases", "task", "engine", "size", "files", "tags", "blocks", "pushed")
    print_rows(
        titles, map(_make_table_row, versions), "the registry is empty: send a model with `penstock model push FOLDER`"
    )


def _make_table_row(found: "ModelVersion") -> tuple[object, ...]:
    facts = found.facts
    return (
        found.model,
        found.version,
        ", ".join(found.aliases),
        facts.get("task", ""),
        facts.get("engine", ""),
        _format_size(found.size_bytes),
        found.files,
        ", ".join(facts.get("tags", ())),
        ", ".join(found.blocks),
        found.created_at[:16].replace("T", " "),
    )


def _split_name(name: str) -> tuple[str, str]:
    model, _, version = name.partition(":")
    if not re.fullmatch("[0-9]+", version):
        raise InvalidRequest(f"'{name}' has no version number: give NAME:VERSION")
    return model, version


def _convert_to_json(found: "ModelVersion") -> dict[str, Any]:
    return {
        "model": found.model,
        "version": found.version,
        "digest": found.digest,
        "size_bytes": found.size_bytes,
        "files": found.files,
        "created_at": found.created_at,
        "aliases": list(found.aliases),
        "blocks": list(found.blocks),
        "metadata": dict(found.facts),
    }


def _format_size(size_bytes: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes = size_bytes / 1000  # type: ignore[assignment]
    return f"{size_bytes:.3g} GB"
