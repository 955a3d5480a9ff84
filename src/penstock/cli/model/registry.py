"""`penstock model push`, `pull`, `delete` and `alias`: the model registry of a cluster."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.cluster.asking import Asked, asks, print_done
from penstock.cli.terminal.options import AsJson
from penstock.cli.terminal.output import print_json, print_rows
from penstock.cli.terminal.progress import show_bytes, show_steps
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.client.registry import ModelVersion, RegistryClient

T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="NAME[:VERSION|@ALIAS]", help="Without either, the latest version.")]


def _ask(asked: Asked, act: "Callable[[RegistryClient], Awaitable[T]]") -> T:
    """What a server would log, a command keeps to itself: its standard output is the answer's."""
    import logging

    import structlog

    from penstock.client.registry import RegistryClient

    addresses, channels = asked.find()

    async def call() -> T:
        async with RegistryClient(",".join(addresses), channels=channels) as client:
            return await act(client)

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        return asyncio.run(call())
    finally:
        structlog.configure(**before)


@asks
def push(
    asked: Asked,
    folder: Annotated[Path, typer.Argument(help="A model's folder, with its model.yaml.")],
    version: Annotated[str, typer.Option(metavar="N", help="Which to send. [default: the newest served]")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="A tag beside those of model.yaml; may be repeated.")] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not load the model here first.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that it may take to load and answer here.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Send a version of a model to the registry. What was sent before is not sent again; what is cut goes on."""
    from penstock.core.manifest import ModelFacts
    from penstock.models.registry.scan import check_facts, scan

    folder = folder.absolute()
    with show_steps(f"reading {folder.name}") as tell:
        scanned = scan(folder, version, tell)
        manifest = scanned.manifest
        facts = ModelFacts()
        if not no_check:
            tell("loading it as a worker would")
            facts = check_facts(folder, manifest.version, timeout)
    facts = facts.model_copy(update={"tags": (*facts.tags, *(tag or ()))})

    async def send(client: "RegistryClient") -> "ModelVersion":
        with show_bytes(f"{manifest.model}:{manifest.version}", manifest.size_bytes) as on_progress:
            return await client.push(manifest, scanned.files, facts, on_progress)

    made = _ask(asked, send)
    said = f"pushed {made.model}:{made.version}, {_size(made.size_bytes)} in {made.files} files, {made.digest}"
    print_done(as_json, said, **_as_json(made))


@asks
def pull(
    asked: Asked,
    name: Name,
    folder: Annotated[Path, typer.Argument(help="The model's folder; it is made, or gets one more version.")],
    as_json: AsJson = False,
) -> None:
    """Fetch a version of a model from the registry, verified file by file."""
    from penstock.models.registry.pull import CountedFiles
    from penstock.models.registry.pull import pull as fetch

    async def get(client: "RegistryClient") -> "ModelVersion":
        found = await client.find(name)
        with show_bytes(f"{found.model}:{found.version}", found.size_bytes) as on_progress:
            await fetch(CountedFiles(client, on_progress), found.digest, found.version, folder.absolute())
        return found

    found = _ask(asked, get)
    said = f"pulled {found.model}:{found.version}, {_size(found.size_bytes)} in {found.files} files, into {folder}"
    print_done(as_json, said, **_as_json(found), folder=str(folder))


@asks
def delete(
    asked: Asked,
    name: Annotated[str, typer.Argument(metavar="NAME:VERSION")],
    as_json: AsJson = False,
) -> None:
    """Delete a version from the registry. One that is deployed, or that an alias names, is not deleted."""
    model, version = _split(name)
    _ask(asked, lambda client: client.delete(model, version))
    print_done(as_json, f"deleted {name}", deleted=name)


@asks
def alias(
    asked: Asked,
    name: Annotated[str, typer.Argument(metavar="NAME[:VERSION]", help="Without a version the alias goes.")],
    alias: Annotated[str, typer.Argument(help="As in `stable`; `latest` moves by itself.")],
    as_json: AsJson = False,
) -> None:
    """Let a name such as `stable` stand for a version of a model."""
    model, version = _split(name) if ":" in name else (name, "")
    _ask(asked, lambda client: client.set_alias(model, alias, version))
    said = f"{model}@{alias} is {model}:{version}" if version else f"{model} has no alias {alias} any more"
    print_done(as_json, said, model=model, alias=alias, version=version or None)


def list_registry(asked: Asked, as_json: bool) -> None:
    versions = _ask(asked, lambda client: client.list())
    if as_json:
        print_json([_as_json(each) for each in versions])
        return
    titles = ("model", "version", "aliases", "task", "engine", "size", "files", "tags", "blocks", "pushed")
    print_rows(titles, map(_row, versions), "the registry has no models: penstock model push FOLDER sends one")


def _row(found: "ModelVersion") -> tuple[object, ...]:
    facts = found.facts
    return (
        found.model,
        found.version,
        ", ".join(found.aliases),
        facts.get("task", ""),
        facts.get("engine", ""),
        _size(found.size_bytes),
        found.files,
        ", ".join(facts.get("tags", ())),
        ", ".join(found.blocks),
        found.created_at[:16].replace("T", " "),
    )


def _split(name: str) -> tuple[str, str]:
    model, _, version = name.partition(":")
    if not re.fullmatch("[0-9]+", version):
        raise InvalidRequest(f"'{name}': say which version, NAME:VERSION")
    return model, version


def _as_json(found: "ModelVersion") -> dict[str, Any]:
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


def _size(size_bytes: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes = size_bytes / 1000  # type: ignore[assignment]
    return f"{size_bytes:.3g} GB"
