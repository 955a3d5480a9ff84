"""The options with which a command chooses a server, and the addresses of that server."""

import json
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.cluster.addresses import Address, parse_address
from penstock.core.errors import InvalidRequest, Unavailable
from penstock.terminal.access import Access, Authority, KeyFile, read_settings, with_options
from penstock.terminal.chosen_server import HTTP_PORT, ChosenServer, choose_server
from penstock.terminal.output import escape_controls

if TYPE_CHECKING:
    from penstock.core.config import Config
    from penstock.wire.channels import Channels

ServerAddress = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="ADDRESS",
        envvar="PENSTOCK_SERVER",
        help="The server: HOST[:PORT], a URL, the path of a data directory, or etcd://HOST:PORT of a cluster. "
        "[default: the current context, or the server whose data directory is in this folder]",
    ),
]
LOOKUP_S = 5.0  # timeout for a server to report its other addresses


class Server:
    """The server that a command calls. If no server can be found, the first use of an address raises an error."""

    def __init__(
        self, address: str | None, config: Path | None = None, key_file: Path | None = None, ca: Path | None = None
    ) -> None:
        from penstock.terminal.saved_contexts import read_contexts

        saved = read_contexts()
        self._context = (saved.current, saved.find(saved.current)) if saved.current and not address else None
        if self._context is not None:
            key_file, ca = key_file or self._context[1].key_file, ca or self._context[1].ca
        self._address = address
        self.settings: Config = read_settings(config, key_file, ca)

    @cached_property
    def _chosen_server(self) -> ChosenServer:
        return choose_server(self._address, self._context, self.settings)

    @property
    def is_named(self) -> bool:
        """True if an option, a setting or a context names the server; otherwise the data directory determines it."""
        return bool(self._address or self._context or self.settings.cluster.join)

    @property
    def models(self) -> str:
        """Return the model repository of a server on this machine, or an empty text if unknown."""
        return self._chosen_server.models

    @property
    def label(self) -> str:
        return self._chosen_server.label

    @cached_property
    def access(self) -> Access:
        return Access.of(self.settings, self._chosen_server.ca)

    @property
    def channels(self) -> "Channels":
        from penstock.wire.channels import Channels

        return Channels.from_config(self.settings)

    @cached_property
    def http(self) -> str:
        """Return the HTTP address of a gateway, as a URL."""
        chosen = self._chosen_server
        if chosen.http or chosen.peer:
            return self.access.url(chosen.http or str(parse_address(chosen.peer).with_default_port(HTTP_PORT)))
        raise InvalidRequest(f"--server {chosen.label}: this command needs an HTTP address, such as http://HOST:8080")

    @cached_property
    def grpc(self) -> str:
        """Return the gRPC address of a gateway."""
        chosen = self._chosen_server
        if chosen.grpc:
            return chosen.grpc
        if chosen.managers:
            return self._find_gateway()
        try:
            with self._open("/v1/server") as answer:
                port = int(json.load(answer)["grpc_port"])
        except NotHttp:
            return str(parse_address(chosen.peer).with_default_port(HTTP_PORT))
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self.http} did not return its gRPC port: give --server grpc://HOST:PORT") from error
        scheme, _, rest = self.http.partition("://")
        host = rest.partition("/")[0]
        return f"{'grpcs' if scheme == 'https' else 'grpc'}://{Address(parse_address(host).host, port)}"

    @cached_property
    def managers(self) -> list[str]:
        """Return the addresses of the managers."""
        from urllib.error import HTTPError

        from penstock.storage.process_addresses import find_managers

        chosen = self._chosen_server
        if chosen.managers:
            is_store = "://" in chosen.managers
            return read_managers(chosen.managers) if is_store else find_managers(chosen.managers)
        if chosen.grpc:
            raise InvalidRequest(f"--server {chosen.grpc}: this command needs an HTTP address or a manager's address")
        try:
            with self._open("/v1/admin/status") as answer:
                found = [each["address"] for each in json.load(answer)["managers"]]
        except (NotHttp, Unavailable) as error:
            if chosen.peer and not isinstance(error.__cause__, HTTPError):
                return find_managers(chosen.peer)
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(
                f"{self.http} did not return the addresses of its managers: give --server HOST:PORT of a manager"
            ) from error
        reachable = [each for each in found if not each.startswith("unix:") or Path(each[5:]).exists()]
        if not reachable:
            raise InvalidRequest(
                f"the manager of {self.http} listens only on its own machine: run this command there, start the server "
                f"with --bind, or use {self.http}/v1/admin"
            )
        return reachable

    def print_changed(self) -> None:
        """Print on standard error which server a command changed."""
        print(escape_controls(f"penstock: changed the server {self.label}"), file=sys.stderr)

    def _open(self, path: str) -> Any:
        """Request a path over HTTP; raise NotHttp if the address has no scheme and is not an HTTP address."""
        from penstock.terminal.http import open_path

        try:
            return open_path(self.access, self.http, path, LOOKUP_S)
        except Unavailable as error:
            if self._chosen_server.peer and _is_other_protocol(error.__cause__):
                raise NotHttp from error
            raise

    def _find_gateway(self) -> str:
        from penstock.client.cluster import ClusterClient

        with ClusterClient(self.managers, LOOKUP_S, self.channels) as client:
            found = [each["address"] for each in client.ask("Status")["gateways"] if each["address"]]
        if not found:
            raise Unavailable(f"{self.label}: no gateway is connected: start one, or give its address")
        return str(found[0])


class NotHttp(Exception):
    """The server answered, but does not speak HTTP/1.1: the address is a gRPC address."""


def takes_server(command: Callable[..., None]) -> Callable[..., None]:
    """Add --server, --key-file and --ca to a command, which gets a `Server` as its first argument."""

    def run(server: ServerAddress = None, key_file: KeyFile = None, ca: Authority = None, **options: Any) -> None:
        command(Server(server, None, key_file, ca), **options)

    return with_options(command, run)


def _is_other_protocol(cause: BaseException | None) -> bool:
    from http.client import HTTPException
    from ssl import SSLCertVerificationError, SSLError

    reason = getattr(cause, "reason", cause)
    if isinstance(reason, SSLError):
        return not isinstance(reason, SSLCertVerificationError)
    return isinstance(reason, HTTPException | ConnectionResetError | BrokenPipeError)


def read_managers(url: str) -> list[str]:
    """Return the addresses of the managers that use this metadata store."""
    import asyncio

    from pydantic import ValidationError

    from penstock.core.cluster.manager_records import MANAGERS_PREFIX, ManagerRecord
    from penstock.storage.metadata.opening import open_metadata

    async def read() -> list[bytes]:
        store = await open_metadata(url, Path())
        try:
            return [record.value for record in (await store.list(MANAGERS_PREFIX)).records]
        finally:
            await store.close()

    try:
        found = [ManagerRecord.model_validate_json(value).address for value in asyncio.run(read())]
    except ValidationError as error:
        raise Unavailable(
            f"{url}: the managers' records cannot be read, because another version of Penstock wrote them: use the "
            "version of the managers"
        ) from error
    if not found:
        raise Unavailable(f"{url}: no manager is running: start one, or give --server HOST:PORT of a manager")
    return found
