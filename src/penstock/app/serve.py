"""All roles on this machine: supervisor and manager here, every gateway and every worker a process of its own."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from penstock.app.certificates import open_certificates
from penstock.app.folders import data_folder, run_folder
from penstock.app.manager import open_manager, reserve_manager
from penstock.app.orphans import adopt_orphans
from penstock.app.places import (
    ServerPlaces,
    advertised_manager,
    check_bind,
    http_scheme,
    is_clustered,
    join_addresses,
    named,
    task_worker_ids,
)
from penstock.app.ports import reserve_ports
from penstock.app.process import LEAVE_S, OF_TERMINALS, spare_collector, stop_on_signals
from penstock.core.cluster.addresses import Address
from penstock.core.cluster.leaders import ManagerRecord
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.gateway.grpc.choice import choose_grpc_server
from penstock.manager.fleet.base import FleetRole
from penstock.manager.fleet.local import LocalFleet
from penstock.telemetry.logs import start_logs
from penstock.telemetry.metrics import SupervisorMetrics, forget_gauges, share_metrics

log = structlog.get_logger()
OnListening = Callable[[str, str], None]
SUPERVISOR = "supervisor"


def run_serve(config: Config, on_listening: OnListening = lambda http, grpc: None) -> None:
    """`on_listening` is told the HTTP and gRPC addresses once they are open."""
    _check(config)
    start_logs(config.telemetry, role="serve")
    # A machine that joins keeps nothing of the cluster's: the managers do.
    data = nullcontext() if config.cluster.join else data_folder(config.data_dir)
    with data, run_folder() as folder:
        uvloop.run(_serve(config, ServerPlaces(folder), on_listening))


def _check(config: Config) -> None:
    config.check_reach()
    choose_grpc_server(config)
    if is_clustered(config):
        check_bind(config)
        join_addresses(config.cluster.join)
    if not config.gateways + config.workers or not (config.cluster.join or (config.gateways and config.workers)):
        raise ConfigError("a server without gateways or without workers has to --join others that have them")


async def _serve(config: Config, places: ServerPlaces, on_listening: OnListening) -> None:
    stop = stop_on_signals(signal.SIGTERM, *OF_TERMINALS)
    # What is open must close when a later step fails, or the process would not end.
    async with AsyncExitStack() as stack:
        adopt_orphans(stack)
        await _run_roles(config, places, stack, stop, on_listening)


async def _run_roles(
    config: Config,
    places: ServerPlaces,
    stack: AsyncExitStack,
    stop: asyncio.Event,
    on_listening: OnListening,
) -> None:
    places.write_config(config)
    share_metrics(places.metrics, SUPERVISOR)
    http_port, grpc_port = reserve_ports(config, stack) if config.gateways else (0, 0)
    look, guard, certificates = None, None, open_certificates(config, stack)
    if not config.cluster.join:  # first: what it cannot serve is told, and nothing else
        me, bound = ManagerRecord(manager_id="manager", address=places.manager), []
        if is_clustered(config):
            bound = [reserve_manager(config, stack)]
            told = advertised_manager(config, bound[0].port or 0)
            me = ManagerRecord(manager_id=named(config, "manager"), address=told)
        opened = await open_manager(
            config, stack, me, certificates, places.manager, *map(str, bound), is_fresh=not bound
        )
        for address in bound:
            from penstock.app.registry import behind_door, open_http_door

            behind = behind_door(opened, places.manager, certificates, stack)
            await open_http_door(config, behind, address.host, certificates, stack)
        look, guard = opened.look, opened.guard
    supervisor = await _start_children(config, places, http_port, grpc_port)
    stack.push_async_callback(supervisor.close)
    if is_clustered(config):
        from penstock.app.doors import MACHINE_DOOR, open_health_door

        await open_health_door(config, places, MACHINE_DOOR, supervisor.problem, certificates, stack, look, guard=guard)
    if not await _until_open(supervisor, stop):
        return
    http, grpc = f"{http_scheme(config)}://{Address(config.host, http_port)}", str(Address(config.host, grpc_port))
    if config.gateways:
        on_listening(http, grpc)
    log.info(
        "serving", http=http, grpc=grpc, models=str(config.models), workers=config.workers, gateways=config.gateways
    )
    spare_collector()
    await stop.wait()
    log.info("stopping")
    await _stop_children(config, supervisor)


async def _start_children(config: Config, places: ServerPlaces, http_port: int, grpc_port: int) -> LocalFleet:
    metrics = SupervisorMetrics(CollectorRegistry())
    supervisor = LocalFleet(config.data_plane, partial(_child_ended, places, metrics))
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    for index in range(config.gateways):
        name = named(config, f"gateway-{index}")
        await supervisor.start(FleetRole(name, places.command("gateway", name, *ports), is_door=True))
    for index in range(config.workers):
        name = named(config, f"worker-{index}")
        command = places.command("worker", name)
        is_only = not config.gateways  # then nothing else tells whether the machine was let in
        await supervisor.start(FleetRole(name, command, is_door=is_only, says_ready=is_clustered(config)))
    for name in task_worker_ids(config):
        await supervisor.start(FleetRole(name, places.command("tasks", name)))
    return supervisor


def _child_ended(places: ServerPlaces, metrics: SupervisorMetrics, name: str, why: str) -> None:
    forget_gauges(places.metrics, name)
    if why != "stopped":
        metrics.restarts.labels(name, why).inc()


async def _until_open(supervisor: LocalFleet, stop: asyncio.Event) -> bool:
    """False where the server is asked to leave before it has come."""
    opening, stopping = asyncio.ensure_future(supervisor.until_open()), asyncio.ensure_future(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for waiting in (opening, stopping):
        waiting.cancel()
    if opening.done() and not opening.cancelled():
        opening.result()
    return not stop.is_set()


async def _stop_children(config: Config, supervisor: LocalFleet) -> None:
    """Gateways first: what is inside needs its workers."""
    timeout_s = config.data_plane.drain_s + LEAVE_S
    await supervisor.stop(supervisor.doors(), timeout_s)
    await supervisor.stop(supervisor.names(), timeout_s)
