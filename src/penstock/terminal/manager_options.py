"""The options of the commands that call managers, and the output of such commands."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import typer

from penstock.core.error_text import escape_control_characters
from penstock.terminal.access import Authority, KeyFile, with_options
from penstock.terminal.output import escape_controls, print_json
from penstock.terminal.server_options import Server, ServerAddress

TIMEOUT_S = 10.0
SILENT_S = 3.0  # a command that waits longer than this prints the reason
MAX_REPLICAS = 1_000_000


def takes_manager_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose a server's managers to a command, which gets a `Server` as its first argument."""

    def run(
        server: ServerAddress = None,
        config: Annotated[
            Path | None,
            typer.Option(help="YAML configuration file whose cluster.join names the managers. [default: none]"),
        ] = None,
        key_file: KeyFile = None,
        ca: Authority = None,
        **options: Any,
    ) -> None:
        command(Server(server, config, key_file, ca), **options)

    return with_options(command, run)


def takes_manager_client(command: Callable[..., None]) -> Callable[..., None]:
    """Like `takes_manager_options`, but pass a connected `ClusterClient` as the first argument."""
    return _takes_client(command, is_changing=False)


def changes_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Like `takes_manager_client`, but also print on standard error which server the command changed."""
    return _takes_client(command, is_changing=True)


def _takes_client(command: Callable[..., None], is_changing: bool) -> Callable[..., None]:
    def run(
        server: Server,
        timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = TIMEOUT_S,
        **options: Any,
    ) -> None:
        from penstock.client.cluster import ClusterClient

        with ClusterClient(server.managers, timeout, server.channels) as client:
            command(client, **options)
        if is_changing:
            server.print_changed()

    return takes_manager_options(with_options(command, run))


@contextmanager
def print_if_slow(text: str) -> Iterator[None]:
    """Print a text to standard error if the `with` block takes longer than `SILENT_S`."""
    timer = Timer(SILENT_S, lambda: print(f"penstock: {escape_control_characters(text)}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_done(is_json: bool, text: str | list[str], **fields: object) -> None:
    """Print the result of a command: `fields` as JSON, or `text`, which is one line or a list of lines."""
    if is_json:
        print_json(fields)
    else:
        print("\n".join(escape_controls([text] if isinstance(text, str) else text)))
