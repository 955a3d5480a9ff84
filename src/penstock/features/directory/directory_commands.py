"""`penstock directory list|show|register|update|delete`: query and change a directory of inference servers."""

import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.core.error_text import explain_cause
from penstock.core.errors import InvalidRequest
from penstock.terminal.access import Authority, KeyFile, read_settings, with_options
from penstock.terminal.manager_options import print_done
from penstock.terminal.output import print_json, print_list
from penstock.terminal.shared_options import AsJson

if TYPE_CHECKING:
    from penstock.features.directory.directory_client import DirectoryClient

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:7450"
ServerId = Annotated[str, typer.Argument(metavar="ID", help="The inference_server_id.")]
TITLES = ("id", "name", "url", "tags", "registered")


def _takes_directory(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose a directory to a command, whose first argument becomes a `DirectoryClient`."""

    def run(
        directory: Annotated[
            str | None,
            typer.Option(metavar="URL", help="The directory. [default: setting directory.url, or this machine's]"),
        ] = None,
        key_file: KeyFile = None,
        ca: Authority = None,
        timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 10.0,
        **options: Any,
    ) -> None:
        from penstock.features.directory.directory_client import DirectoryClient
        from penstock.wire.credentials.tls_files import TlsFiles

        settings = read_settings(None, key_file, ca)
        tls = settings.tls
        files = TlsFiles(tls.cert, tls.key, settings.directory.ca or tls.ca)
        url = directory or settings.directory.url or DEFAULT_URL
        command(DirectoryClient(url, settings.own_key(), files, timeout), **options)

    return with_options(command, run)


@_takes_directory
def list_servers(
    client: "DirectoryClient",
    query: Annotated[str, typer.Option(metavar="JSON", help="A MongoDB query.")] = "{}",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of servers to show.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List inference servers."""
    found = _run_request(client.find(_read_object(query, "--query"), limit))
    print_list(as_json, found, TITLES, _table_row, "no inference server matches")


@_takes_directory
def show_server(client: "DirectoryClient", server_id: ServerId) -> None:
    """Show an inference server."""
    print_json(_run_request(client.get(server_id)))


@_takes_directory
def register_server(
    client: "DirectoryClient",
    public_url: Annotated[str, typer.Argument(help="URL at which clients reach the server.")],
    name: Annotated[str, typer.Option(help="Display name. [default: none]")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="A tag; may be repeated. [default: none]")] = None,
    metadata: Annotated[
        str, typer.Option(metavar="JSON", help="JSON object with region, provider and other metadata.")
    ] = "{}",
    lease: Annotated[float | None, typer.Option(min=1, help="Seconds until the record ends. [default: never]")] = None,
    as_json: AsJson = False,
) -> None:
    """Register an inference server. Servers started with `penstock serve --directory` register themselves."""
    document = {
        "inference_server_name": name,
        "inference_server_metadata": _read_object(metadata, "--metadata"),
        "inference_server_tags": tag or [],
        "inference_server_public_url": public_url,
    }
    made = _run_request(client.register(document, lease))
    print_done(as_json, f"registered {made['inference_server_id']}", **made)


@_takes_directory
def update_server(
    client: "DirectoryClient",
    server_id: ServerId,
    update: Annotated[str, typer.Argument(metavar="JSON", help='A MongoDB update, such as {"$set": {…}}.')],
    as_json: AsJson = False,
) -> None:
    """Change an inference server."""
    changed = _run_request(client.update(server_id, _read_object(update, "the update")))
    print_done(as_json, f"updated {server_id}", **changed)


@_takes_directory
def delete_server(client: "DirectoryClient", server_id: ServerId, as_json: AsJson = False) -> None:
    """Delete an inference server from the directory."""
    _run_request(client.delete(server_id))
    print_done(as_json, f"deleted {server_id}", deleted=server_id)


def _run_request(request: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(request)


def _read_object(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {explain_cause(error)}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} must be a JSON object, not {text[:80]}")
    return found


def _table_row(server: dict[str, Any]) -> tuple[object, ...]:
    return (
        server["inference_server_id"],
        server["inference_server_name"],
        server["inference_server_public_url"],
        ", ".join(server["inference_server_tags"]),
        server["registered_at"],
    )
