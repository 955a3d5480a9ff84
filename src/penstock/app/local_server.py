"""Runs all roles on one machine: supervisor and manager in this process, each gateway and worker in a child process."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import NamedTuple

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from penstock.app.gateway.clients_edge import (
    find_manager_sockets,
    has_ports,
    needs_edge,
    open_clients_edge,
    open_manager_edge,
)
from penstock.app.manager_role import open_manager, reserve_manager
from penstock.app.orphans import adopt_orphans
from penstock.app.ports import reserve_ports
from penstock.app.role_certificates import open_certificates
from penstock.app.role_process import LEAVE_S, TERMINAL_SIGNALS, stop_on_signals, tune_garbage_collection
from penstock.core.blocks import BlockDescription
from penstock.core.cluster.addresses import Address
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.features.directory.announcer import announce_server
from penstock.gateway.native_grpc.server_choice import choose_grpc_server
from penstock.manager.fleet.local_fleet import LocalFleet
from penstock.manager.fleet.role_processes import FleetRole
from penstock.storage.process_addresses import (
    ServerPaths,
    check_bind,
    choose_http_scheme,
    find_advertised_manager,
    is_clustered,
    make_role_id,
    parse_join_addresses,
)
from penstock.storage.server_folders import create_run_folder, lock_data_folder
from penstock.telemetry.logs import start_logs
from penstock.telemetry.metrics import SupervisorMetrics, forget_gauges, share_metrics

log = structlog.get_logger()
SUPERVISOR = "supervisor"


class ReadyServer(NamedTuple):
    """A server that has just become ready."""

    http: str
    grpc: str
    asks_for_keys: bool
    blocks: list[BlockDescription]  # some of the served blocks


OnReady = Callable[[ReadyServer], None]


def run_serve(config: Config, on_listening: Callable[[], None], on_ready: OnReady) -> None:
    """Run a server until it is stopped.

    `on_listening` is called once the endpoints are open, `on_ready` once the first gateway is ready.
    """
    _check_config(config)
    start_logs(config.telemetry, role="serve")
    # A machine that joins a cluster stores no cluster state: the managers do.
    data = nullcontext() if config.cluster.join else lock_data_folder(config.data_dir)
    with data, create_run_folder() as folder:
        uvloop.run(_serve(config, ServerPaths(folder), on_listening, on_ready))


def _check_config(config: Config) -> None:
    config.check_reach()
    choose_grpc_server(config)
    if is_clustered(config):
        check_bind(config)
        parse_join_addresses(config.cluster.join)
    if not config.gateways + config.workers or not (config.cluster.join or (config.gateways and config.workers)):
        raise ConfigError(
            "this server has no gateways or no workers: --join a cluster that has them, or start at least one of each"
        )


async def _serve(config: Config, paths: ServerPaths, on_listening: Callable[[], None], on_ready: OnReady) -> None:
    stop = stop_on_signals(signal.SIGTERM, *TERMINAL_SIGNALS)
    # The stack closes what is open if a later step fails; otherwise the process would not end.
    async with AsyncExitStack() as stack:
        adopt_orphans(stack)
        await _run_roles(config, paths, stack, stop, on_listening, on_ready)


async def _run_roles(
    config: Config,
    paths: ServerPaths,
    stack: AsyncExitStack,
    stop: asyncio.Event,
    on_listening: Callable[[], None],
    on_ready: OnReady,
) -> None:
    share_metrics(paths.metrics, SUPERVISOR)
    http_port, grpc_port = reserve_ports(config, stack) if has_ports(config) else (config.http_port, config.grpc_port)
    paths.write_config(config.model_copy(update={"http_port": http_port, "grpc_port": grpc_port}))
    cluster_metrics, guard, certificates = None, None, open_certificates(config, stack)
    if not config.cluster.join:  # the manager first, so that its errors are reported alone
        me, bound, sockets = ManagerRecord(manager_id="manager", address=paths.manager), [], None
        if is_clustered(config):
            sockets = find_manager_sockets(config, paths.folder)
            bound = [reserve_manager(config, stack)]
            advertised = find_advertised_manager(config, bound[0].port or 0)
            me = ManagerRecord(manager_id=make_role_id(config, "manager"), address=advertised)
        addresses = [paths.manager, *(map(str, bound) if sockets is None else ())]
        opened = await open_manager(config, stack, me, certificates, *addresses, is_fresh=not bound, sockets=sockets)
        for address in bound:
            from penstock.app.registry_endpoint import make_http_services, open_http_endpoint

            behind = make_http_services(opened, paths.manager, stack)
            registry = await open_http_endpoint(config, behind, address.host, certificates, stack, sockets)
            if sockets is not None:
                await open_manager_edge(config, paths.folder, address, registry, sockets, certificates, stack)
        cluster_metrics, guard = opened.cluster_metrics, opened.guard
    has_edge = config.gateways and needs_edge(config, guard is not None and not guard.is_open)
    if has_edge:
        config = config.model_copy(update={"edge_sockets": paths.folder})
        paths.write_config(config.model_copy(update={"http_port": http_port, "grpc_port": grpc_port}))
    supervisor = await _start_children(config, paths, http_port, grpc_port)
    stack.push_async_callback(supervisor.close)
    if is_clustered(config):
        from penstock.app.health_listeners import MACHINE_PORTS, open_health_listeners

        await open_health_listeners(
            config, paths, MACHINE_PORTS, supervisor.describe_problem, certificates, stack, cluster_metrics, guard=guard
        )
    if not await _wait_first(supervisor.wait_until_open(), stop):
        return
    edge = None
    if has_edge:
        names = sorted(supervisor.list_names_reporting_open())
        edge = await open_clients_edge(config, paths.folder, names, http_port, grpc_port, certificates, stack)
    http, grpc = (
        f"{choose_http_scheme(config)}://{Address(config.host, http_port)}",
        str(Address(config.host, grpc_port)),
    )
    on_listening()
    log.info(
        "server_started",
        http=http,
        grpc=grpc,
        models=str(config.models),
        workers=config.workers,
        gateways=config.gateways,
    )
    if config.gateways:
        announce_server(config, stack)
    tune_garbage_collection()
    ready = asyncio.ensure_future(supervisor.wait_until_ready())
    if await _wait_first(ready, stop):
        on_ready(ReadyServer(http, grpc, *ready.result()))
    await stop.wait()
    log.info("shutdown_started")
    if edge is not None:
        await edge.drain()
    await _stop_children(config, supervisor)


async def _start_children(config: Config, paths: ServerPaths, http_port: int, grpc_port: int) -> LocalFleet:
    metrics = SupervisorMetrics(CollectorRegistry())
    supervisor = LocalFleet(config.data_plane, partial(_on_child_end, paths, metrics))
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    for index in range(config.gateways):
        name = make_role_id(config, f"gateway-{index}")
        await supervisor.start(FleetRole(name, paths.build_command("gateway", name, *ports), reports_open=True))
    for index in range(config.workers):
        name = make_role_id(config, f"worker-{index}")
        command = paths.build_command("worker", name)
        is_only = not config.gateways  # without gateways, only workers show whether the cluster accepted the machine
        await supervisor.start(FleetRole(name, command, reports_open=is_only, reports_ready=is_clustered(config)))
    return supervisor


def _on_child_end(paths: ServerPaths, metrics: SupervisorMetrics, name: str, reason: str) -> None:
    forget_gauges(paths.metrics, name)
    if reason != "stopped":
        metrics.restarts.labels(name, reason).inc()


async def _wait_first(wanted: Awaitable[object], stop: asyncio.Event) -> bool:
    """Wait for `wanted`; return False if the server is stopped first."""
    waiting, stopping = asyncio.ensure_future(wanted), asyncio.ensure_future(stop.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for each in (waiting, stopping):
        each.cancel()
    if waiting.done() and not waiting.cancelled():
        waiting.result()
    return not stop.is_set()


async def _stop_children(config: Config, supervisor: LocalFleet) -> None:
    """Stop the gateways first, because their running requests need the workers."""
    timeout_s = config.data_plane.drain_s + LEAVE_S
    await supervisor.stop(supervisor.list_names_reporting_open(), timeout_s)
    await supervisor.stop(supervisor.list_names(), timeout_s)
