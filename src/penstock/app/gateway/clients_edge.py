"""The edges (Envoy proxies) in front of gateways, of a worker's direct endpoint, and of a manager."""

import stat
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.features.edge.edge_choice import INSTALL, choose_edge
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.gateway.native_grpc.server_choice import choose_grpc_server
from penstock.storage.process_addresses import find_manager_address
from penstock.wire.credentials.certificates import Certificates

if TYPE_CHECKING:
    from penstock.features.edge.edge import Edge

log = structlog.get_logger()
ROLE_PING_S = 3.0  # a manager must notice soon that a role was cut off
ADVICE = f"install Envoy ({INSTALL}), or set edge to none"


def has_ports(config: Config) -> bool:
    """Return whether this server opens ports for clients. Behind the user's own proxy, it opens only unix sockets."""
    return config.gateways > 0 and config.edge_sockets is None


def needs_edge(config: Config, are_keys_required: bool) -> bool:
    """Return whether to start Envoy in front of the gateways. Log a warning if Envoy is needed but not installed."""
    choice = choose_edge(config, config.host, are_keys_required)
    if choice.is_missing:
        log.warning("edge_missing", reason=choice.reason, advice=ADVICE)
    return choice.is_envoy


def find_gateway_sockets(config: Config, name: str) -> GatewaySockets | None:
    """Return the sockets of a gateway behind an edge, or None without an edge; raise ConfigError for an open folder."""
    folder = config.edge_sockets
    if folder is None:
        return None
    try:
        is_open = folder.stat().st_mode & stat.S_IRWXO
    except OSError as error:
        raise ConfigError(f"edge_sockets: {folder}: {error.strerror}; create the folder") from error
    if is_open:
        raise ConfigError(
            f"edge_sockets: every user of this machine can open {folder}, and could claim to be any client: "
            f"chmod 0750 {folder}"
        )
    return GatewaySockets.of(folder, name, choose_grpc_server(config, is_behind_edge=True).is_native)


def find_direct_sockets(config: Config, folder: Path, name: str) -> GatewaySockets | None:
    """Return the sockets of a worker's direct endpoint, or None if the endpoint has no edge.

    `folder` is the run folder; gateways of the same server may have their sockets in it.
    """
    has_gateways_edge = config.edge_sockets == folder
    own = config.model_copy(update={"edge_sockets": None}) if has_gateways_edge else config
    if not choose_edge(own, config.host, are_keys_required=has_gateways_edge).is_envoy:
        return None
    is_native = choose_grpc_server(config, is_behind_edge=True).is_native
    return GatewaySockets.of(folder, f"{name}-direct", is_native, has_http=False)


def find_manager_sockets(config: Config, folder: Path) -> GatewaySockets | None:
    """Return the sockets of a manager behind its own edge, or None if the manager has no edge."""
    own = config.model_copy(update={"edge_sockets": None})  # a proxy that uses these sockets serves gateways only
    choice = choose_edge(own, find_manager_address(config).host)
    if choice.is_missing:
        log.warning("edge_missing", reason=choice.reason, advice=ADVICE)
    return GatewaySockets.of(folder, "manager", is_native=False) if choice.is_envoy else None


async def open_manager_edge(
    config: Config,
    folder: Path,
    manager: Address,
    registry: Address,
    sockets: GatewaySockets,
    certificates: Certificates,
    stack: AsyncExitStack,
) -> None:
    """Start Envoy in front of a manager's gRPC and REST ports; close it with the stack."""
    from penstock.features.edge.edge import Edge  # imported here, because most managers have no edge
    from penstock.features.edge.envoy_http import IDLE_GRPC_S
    from penstock.features.edge.envoy_shape import EdgePort

    edge = Edge(config, folder, certificates, "manager-edge")
    stack.push_async_callback(edge.close)
    ports = [
        EdgePort("manager", manager.host, manager.port or 0, IDLE_GRPC_S, ping_s=ROLE_PING_S),
        EdgePort("registry", registry.host, registry.port or 0, config.limits.idle_timeout_s),
    ]
    await edge.open(ports, [sockets])


async def open_direct_edge(
    config: Config,
    folder: Path,
    name: str,
    port: int,
    sockets: GatewaySockets,
    certificates: Certificates,
    stack: AsyncExitStack,
) -> "Edge":
    """Start Envoy in front of a worker's direct endpoint; close it with the stack."""
    from penstock.features.edge.edge import Edge  # imported here, because most workers have no edge
    from penstock.features.edge.envoy_http import IDLE_GRPC_S
    from penstock.features.edge.envoy_shape import EdgePort

    edge = Edge(config, folder, certificates, f"{name}-edge")
    stack.push_async_callback(edge.close)
    await edge.open([EdgePort("direct", config.host, port, IDLE_GRPC_S)], [sockets])
    return edge


async def open_clients_edge(
    config: Config,
    folder: Path,
    names: Sequence[str],
    http_port: int,
    grpc_port: int,
    certificates: Certificates,
    stack: AsyncExitStack,
) -> "Edge":
    """Start Envoy in front of the gateways with these names, whose sockets are open; close it with the stack."""
    # Imported here, because a server on open loopback has no edge.
    from penstock.features.edge.edge import Edge, clients_ports

    edge = Edge(config, folder, certificates)
    stack.push_async_callback(edge.close)
    gateways = [found for name in names if (found := find_gateway_sockets(config, name)) is not None]
    await edge.open(clients_ports(config, http_port, grpc_port), gateways)
    return edge
