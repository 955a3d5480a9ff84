"""Which managers a command asks, what they answer as plain values, and how it is printed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.terminal.access import Authority, KeyFile, read_settings, with_options
from penstock.cli.terminal.output import plain, print_json
from penstock.core.error_text import printable
from penstock.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from penstock.core.config import Config
    from penstock.wire.channels import Channels

Managers = Annotated[
    str | None,
    typer.Option(
        "--manager",
        metavar="HOST:PORT,…",
        help="The managers to ask, or etcd://…. [default: setting cluster.join, or this machine's]",
    ),
]
TIMEOUT_S = 10.0
SILENT_S = 3.0  # of a command that waits, before it says so
MAX_REPLICAS = 1_000_000


class Asked(NamedTuple):
    """Whom a command asks, as its options say."""

    manager: str | None
    config: Path | None
    key_file: Path | None
    ca: Path | None

    def find(self) -> "tuple[list[str], Channels]":
        """The managers' addresses, and how to call them."""
        from penstock.wire.channels import Channels

        settings = read_settings(self.config, self.key_file, self.ca)
        return find_addresses(self.manager, settings), Channels.of(settings)


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say whom it asks, and that as its first argument."""

    def run(
        manager: Managers = None,
        config: Annotated[Path | None, typer.Option(help="A YAML file whose cluster.join names them.")] = None,
        key_file: KeyFile = None,
        ca: Authority = None,
        **options: Any,
    ) -> None:
        command(Asked(manager, config, key_file, ca), **options)

    return with_options(command, run)


def asks_managers(command: Callable[..., None]) -> Callable[..., None]:
    """The same, with the managers' client as the first argument."""

    def run(
        asked: Asked,
        timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = TIMEOUT_S,
        **options: Any,
    ) -> None:
        from penstock.client.cluster import ClusterClient

        addresses, channels = asked.find()
        with ClusterClient(addresses, timeout, channels) as client:
            command(client, **options)

    return asks(with_options(command, run))


@contextmanager
def said_while_waiting(text: str) -> Iterator[None]:
    """On standard error, once it takes long: a command that waits in silence looks as if it hung."""
    timer = Timer(SILENT_S, lambda: print(f"penstock: {printable(text)}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def find_addresses(managers: str | None, settings: "Config") -> list[str]:
    """Of those that were given, of the setting cluster.join, or this machine's."""
    from penstock.app.folders import local_managers
    from penstock.app.places import MANAGER_PORT, find_managers

    join = managers or settings.cluster.join
    if "://" in join:
        return managers_in(join)
    if join:
        return find_managers(join)
    found = local_managers(settings.data_dir)
    if len(found) > 1:
        raise InvalidRequest(f"several servers run on this machine: choose with --manager one of {', '.join(found)}")
    return found or [f"127.0.0.1:{MANAGER_PORT}"]


def managers_in(url: str) -> list[str]:
    """The addresses of the managers that share this store."""
    import asyncio

    from pydantic import ValidationError

    from penstock.core.cluster.leaders import MANAGERS, ManagerRecord
    from penstock.storage.metadata.opening import open_metadata

    async def read() -> list[bytes]:
        store = await open_metadata(url, Path())
        try:
            return [record.value for record in (await store.list(MANAGERS)).records]
        finally:
            await store.close()

    try:
        found = [ManagerRecord.model_validate_json(value).address for value in asyncio.run(read())]
    except ValidationError as error:
        raise Unavailable("the managers in the store were written by another version of Penstock") from error
    if not found:
        raise Unavailable("no manager runs on this store just now: start one, or give --manager HOST:PORT")
    return found


def print_done(is_json: bool, said: str | list[str], **fields: object) -> None:
    """`said`: a line, or several."""
    if is_json:
        print_json(fields)
    else:
        print("\n".join(plain([said] if isinstance(said, str) else said)))
