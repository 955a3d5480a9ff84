"""Opens a manager's model registry, with its storage and the removal of unused files, and its HTTP endpoint."""

import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import structlog

from penstock.app.ports import open_default_port, open_unix_socket, open_unshared_socket, reserve_port
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.endpoints.guard import Guard
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.features.registry.model_registry import ModelRegistry
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.objects.object_store import open_objects
from penstock.storage.process_addresses import choose_http_scheme
from penstock.telemetry.background import BackgroundTasks
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader_connection import FixedLeader, LeaderClient

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.app.manager_role import OpenManager
    from penstock.endpoints.http.http_guard import HttpGuard
    from penstock.endpoints.http.openapi import Admit
    from penstock.features.admin.apps import ManagerApp

log = structlog.get_logger()
DEFAULT_PORT = 7412


def open_registry(
    config: Config, store: MetadataStore, on_event: Callable[[str, str, str], None], stack: AsyncExitStack
) -> ModelRegistry:
    if config.cluster.join and not config.registry.objects:
        advice = (
            "with several managers, set registry.objects to a folder that all of them share, or to s3://BUCKET/PREFIX"
        )
        log.warning("models_stored_by_one_manager", folder=str(config.data_dir / "objects"), advice=advice)
    objects = open_objects(config.registry.objects, config.data_dir / "objects", config.s3)
    registry = ModelRegistry(store, objects, config.data_dir / "uploads", config.registry, on_event)
    tasks = BackgroundTasks("registry")
    tasks.supervise("registry-files", registry.wait_and_delete_unused_files, deadline_s=None)
    stack.push_async_callback(tasks.close)
    return registry


class HttpServices(NamedTuple):
    """Parts of a manager that its HTTP endpoint uses."""

    registry: ModelRegistry
    guard: Guard
    leader: LeaderClient  # for administration calls
    own_manager: LeaderClient  # always this manager, for reads


def make_http_services(opened: "OpenManager", manager_socket: str, stack: AsyncExitStack) -> HttpServices:
    """Return the parts for the HTTP endpoint; `manager_socket` is its unix socket."""
    from penstock.manager.leading.elected_manager import ElectedManager

    leader = LeaderClient(ElectedManager(opened.control, manager_socket), opened.managers)
    reads = LeaderClient(FixedLeader(manager_socket), opened.managers)
    for each in (leader, reads):
        stack.push_async_callback(each.close)
    return HttpServices(opened.registry, opened.guard, leader, reads)


async def open_http_endpoint(
    config: Config,
    services: HttpServices,
    host: str,
    certificates: Certificates,
    stack: AsyncExitStack,
    sockets: GatewaySockets | None = None,
) -> Address:
    """Open the REST endpoint of the registry and the administration on the manager's host; return its address.

    `sockets`: the sockets of a manager behind the edge. The endpoint listens there; its port is reserved for the edge.
    """
    # Imported here, because `penstock serve` on one machine does not open this endpoint.
    from penstock.endpoints.http.http_guard import HttpGuard, list_machine_names
    from penstock.endpoints.http.http_server import serve_app
    from penstock.endpoints.http.lazy import LazyApp
    from penstock.endpoints.http.manager_protocol import (
        LIMITS,
        MAX_CONNECTIONS,
        ManagerProtocol,
        create_websocket_protocol,
    )

    listen = partial(open_unshared_socket if sockets is None else _reserve_port, host, "registry.http_port")
    opened = await open_default_port(listen, config.registry.http_port, DEFAULT_PORT)
    http_guard = HttpGuard(config.model_copy(update={"host": host}), services.guard, list_machine_names())
    app = LazyApp(partial(_build_app, http_guard, services))
    limits = config.limits.model_copy(update=LIMITS)
    address = Address(host, opened.getsockname()[1])
    if sockets is not None:
        stack.enter_context(opened)
        opened = open_unix_socket(sockets.http)
    is_behind_edge = sockets is not None
    close = serve_app(
        app,
        opened,
        limits,
        MAX_CONNECTIONS,
        certificates,
        ManagerProtocol,
        create_websocket_protocol,
        is_behind_edge=is_behind_edge,
    )
    stack.push_async_callback(close)
    log.info("registry_listening", http=f"{choose_http_scheme(config)}://{address}")
    return address


async def _reserve_port(host: str, flag: str, port: int) -> socket.socket:
    return reserve_port(host, port, flag)


def _build_app(http_guard: "HttpGuard", services: HttpServices) -> "ManagerApp":
    from penstock.features.admin.apps import ManagerApp, build_cluster_app
    from penstock.features.admin.manager_calls import ClusterCalls
    from penstock.features.registry.registry_rest import RegistryRest

    def build(admit: "Admit") -> "FastAPI":
        calls = ClusterCalls(services.leader, services.own_manager)
        return build_cluster_app(calls, version("penstock-serve"), admit, RegistryRest(services.registry))

    return ManagerApp(http_guard, build)
