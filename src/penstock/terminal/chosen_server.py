"""The server that a command calls: an address, a saved context, or the data directory of the current folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.cluster.addresses import Address, parse_address
from penstock.core.errors import InvalidRequest
from penstock.storage.server_folders import list_running_servers

if TYPE_CHECKING:
    from penstock.core.config import Config
    from penstock.storage.server_folders import RunningServer
    from penstock.terminal.saved_contexts import Context

HTTP_PORT = 8080
HTTP = ("http://", "https://")
GRPC = ("grpc://", "grpcs://")
LOOPBACK = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}  # addresses to connect to, by listening address


@dataclass(frozen=True, slots=True)
class ChosenServer:
    """The addresses of a server; an unknown address is empty."""

    label: str  # names the server in messages
    http: str = ""
    grpc: str = ""
    managers: str = ""  # addresses, separated by commas, or the URL of the managers' store
    peer: str = ""  # HOST[:PORT] without a scheme: HTTP or gRPC of a gateway, or a manager
    ca: str = ""  # the authority of a server on this machine
    models: str = ""  # the repository of a server on this machine


def choose_server(address: str | None, context: "tuple[str, Context] | None", settings: "Config") -> ChosenServer:
    """Return the server that --server, the setting cluster.join, the context or the data directory determines."""
    if address:
        return _parse_server(address)
    if settings.cluster.join:
        return ChosenServer(settings.cluster.join, managers=settings.cluster.join)
    if context is not None:
        name, saved = context
        found = _parse_server(saved.server)
        return replace(found, label=f"{found.label} (context '{name}')")
    data_dir = settings.data_dir.absolute()
    if here := [each for each in list_running_servers() if each.data_dir == data_dir]:
        return _combine_local(here)
    raise InvalidRequest(
        f"no server is chosen, and none runs with the data directory {data_dir}: give --server ADDRESS, save a server "
        f"with `penstock context add`, or start the command in the folder of the server.{_list_running()}"
    )


def _parse_server(address: str) -> ChosenServer:
    """Return the server at an address that a user wrote."""
    if address.startswith(HTTP):
        return ChosenServer(address, http=address.rstrip("/"))
    if address.startswith(GRPC):
        return ChosenServer(address, grpc=address)
    if address.startswith("unix:") or "," in address or "://" in address:
        return ChosenServer(address, managers=address)
    if "/" in address:
        return _find_by_data_directory(Path(address))
    try:
        parse_address(address)
    except ValueError as error:
        raise InvalidRequest(f"--server {address}: {error}") from error
    return ChosenServer(address, peer=address)


def _find_by_data_directory(folder: Path) -> ChosenServer:
    found = [each for each in list_running_servers() if each.data_dir == folder.absolute()]
    if not found:
        raise InvalidRequest(f"no server with the data directory {folder.absolute()} is running.{_list_running()}")
    return _combine_local(found)


def _combine_local(servers: "Sequence[RunningServer]") -> ChosenServer:
    """Combine local processes with one data directory into a server; raise ConfigError for several servers."""
    gateways = [each for each in servers if each.settings.get("gateways") and each.settings.get("http_port")]
    managers = [each.manager for each in servers if each.manager]
    if len(gateways) > 1 or len(managers) > 1:
        raise InvalidRequest(f"several servers have the data directory {servers[0].data_dir}.{_list_running()}")
    joined = [each.settings.get("cluster", {}).get("join", "") for each in servers]
    known = ChosenServer("", managers=(managers or joined)[0])
    for each in gateways:
        http, grpc = _find_client_addresses(each.settings)
        ca, models = each.settings.get("tls", {}).get("ca", ""), each.settings.get("models", "")
        known = replace(known, http=http, grpc=grpc, ca=ca, models=models)
    return replace(known, label=f"{known.http or known.managers} (data directory {servers[0].data_dir})")


def _find_client_addresses(settings: dict[str, Any]) -> tuple[str, str]:
    host = LOOPBACK.get(settings["host"], settings["host"])
    http, grpc = ("https", "grpcs") if settings.get("tls", {}).get("cert") else ("http", "grpc")
    return (
        f"{http}://{Address(host, settings['http_port'])}",
        f"{grpc}://{Address(host, settings['grpc_port'])}",
    )


def _list_running() -> str:
    found = list_running_servers()
    if not found:
        return " No server of this user is running on this machine."
    lines = [f"  --server {_server_address(each)}   data directory {each.data_dir}" for each in found]
    return "\n".join([" Servers on this machine:", *lines])


def _server_address(server: "RunningServer") -> str:
    """Return an address that `--server` accepts for this server."""
    has_gateways = server.settings.get("gateways") and server.settings.get("http_port")
    return _find_client_addresses(server.settings)[0] if has_gateways else server.manager
