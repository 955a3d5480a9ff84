"""Opens a role's health endpoints at the configured ports, or at the role's default ports."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import structlog
from grpc_health.v1.health import aio as health_aio
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from penstock.app.ports import open_default_port, open_unshared_socket
from penstock.app.role_certificates import make_guard
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.core.principals import METRICS_SCOPES, Principal
from penstock.endpoints.guard import Guard
from penstock.endpoints.http.health_app import LIMITS, MAX_CONNECTIONS, HealthApp
from penstock.endpoints.http.http_guard import HttpGuard, list_machine_names
from penstock.endpoints.http.http_server import serve_app
from penstock.features.keys.key_table import KeyTable
from penstock.storage.process_addresses import ServerPaths, choose_http_scheme
from penstock.telemetry.health_endpoint import HealthEndpoint, Problem
from penstock.telemetry.metrics import open_shared_registry
from penstock.wire.credentials.certificates import Certificates, ClientAuth
from penstock.wire.grpc_listener.grpc_server import grpc_server

log = structlog.get_logger()


class DefaultPorts(NamedTuple):
    http: int
    grpc: int


MANAGER_PORTS = DefaultPorts(7410, 7411)
WORKER_PORTS = DefaultPorts(7420, 7421)
MACHINE_PORTS = DefaultPorts(7430, 7431)
DIRECTORY_PORTS = DefaultPorts(7440, 7441)


async def open_health_listeners(
    config: Config,
    paths: ServerPaths,
    defaults: DefaultPorts,
    problem: Problem,
    certificates: Certificates,
    stack: AsyncExitStack,
    cluster_metrics: Callable[[], Collector] | None = None,
    health: health_aio.HealthServicer | None = None,
    guard: Guard | None = None,
) -> None:
    """Open the health endpoints over HTTP and gRPC until the stack closes.

    `cluster_metrics` returns metrics in addition to those of the machine's processes. `health` is a health service
    that another server of the role uses too. Without `guard`, only the role's own key may read the metrics.
    """

    def registry() -> CollectorRegistry:
        found = open_shared_registry(paths.metrics)
        if cluster_metrics is not None:
            found.register(cluster_metrics())
        return found

    wanted, limits = config.health, config.limits.model_copy(update=LIMITS)
    config.check_reach(wanted.host)

    # Health checks need no client certificate.
    endpoint = HealthEndpoint(problem, grpc_server, partial(certificates.add_port, client_auth="none"), health)
    stack.push_async_callback(endpoint.close)
    http_guard = HttpGuard(
        config.model_copy(update={"host": wanted.host}), guard or _make_guard(config), list_machine_names()
    )
    app = HealthApp(http_guard, endpoint.find_problem, registry)
    listen = partial(open_unshared_socket, wanted.host, "health.http_port")
    opened = await open_default_port(listen, wanted.http_port, defaults.http)
    client_auth: ClientAuth = "optional" if certificates.requests_client_certificates else "none"
    close = serve_app(app, opened, limits, MAX_CONNECTIONS, certificates, client_auth=client_auth)
    stack.push_async_callback(close)
    http = Address(wanted.host, opened.getsockname()[1])
    grpc = await open_default_port(
        lambda port: endpoint.open_grpc(Address(wanted.host, port)), wanted.grpc_port, defaults.grpc
    )
    log.info("health_listening", http=f"{choose_http_scheme(config)}://{http}", grpc=str(grpc))


def _make_guard(config: Config) -> Guard:
    """Return a guard that allows callers with the role's own key to read metrics."""
    key, guard = config.own_key(), make_guard(config, config.health.host)
    own = Principal("own", scopes=METRICS_SCOPES)
    guard.set_keys(KeyTable(b"", needs_key=False, further={key: own} if key else {}))
    return guard
