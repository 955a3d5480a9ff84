"""`penstock context add|use|list|remove`: save servers by name."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import InvalidRequest
from penstock.terminal.output import print_list
from penstock.terminal.saved_contexts import Context, read_contexts
from penstock.terminal.shared_options import AsJson

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


def add_context(
    name: Name,
    server: Annotated[str, typer.Argument(metavar="ADDRESS", help="Address of the server, as for --server.")],
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File containing the API key for this server. [default: none]")
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option("--ca", help="PEM file of the certificate authority to trust for TLS. [default: none]"),
    ] = None,
) -> None:
    """Save a server's address by name, or replace a saved address."""
    if not name.strip():
        raise InvalidRequest("the name of a context must not be empty")
    saved = read_contexts()
    is_folder = "/" in server and "://" not in server and not server.startswith("unix:")
    saved.contexts[name] = Context(
        server=str(Path(server).absolute()) if is_folder else server,
        key_file=key_file and key_file.absolute(),
        ca=ca and ca.absolute(),
    )
    saved.save()
    print(f"saved the context '{name}'; `penstock context use {name}` makes commands use it")


def use_context(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the context. [default: use no context]")] = "",
) -> None:
    """Make commands without --server use this context, in every folder."""
    saved = read_contexts()
    server = saved.find(name).server if name else ""
    saved.current = name
    saved.save()
    print(f"commands now use {server} (context '{name}')" if name else "commands now use no context")


def list_contexts(as_json: AsJson = False) -> None:
    """List the saved contexts, and mark the context that commands use."""
    saved = read_contexts()
    rows = [
        {"name": name, "server": each.server, "is_current": name == saved.current}
        for name, each in sorted(saved.contexts.items())
    ]
    nothing = "no context is saved: save one with `penstock context add NAME ADDRESS`"
    titles = ("", "name", "server")
    print_list(as_json, rows, titles, lambda row: ("*" * bool(row["is_current"]), row["name"], row["server"]), nothing)


def remove_context(name: Name) -> None:
    """Remove a saved context."""
    saved = read_contexts()
    saved.find(name)
    del saved.contexts[name]
    saved.current = "" if saved.current == name else saved.current
    saved.save()
    print(f"removed the context '{name}'")
