"""The gateway role: joins the cluster, opens the ports for clients, and leaves."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import structlog

from penstock.app.gateway.clients_edge import find_gateway_sockets, has_ports, needs_edge, open_clients_edge
from penstock.app.gateway.gateway import Gateway, locate_kept_file
from penstock.app.leaders import open_leader
from penstock.app.ports import open_http_socket, open_unix_socket, reserve_ports
from penstock.app.role_certificates import open_certificates
from penstock.app.role_process import RoleRun, RoleStart, run_role, tune_garbage_collection
from penstock.core.blocks import BlockDescription, GatewayMember
from penstock.core.cluster.addresses import Address
from penstock.features.directory.announcer import announce_server
from penstock.storage.process_addresses import (
    check_bind,
    check_join,
    choose_http_scheme,
    find_clients_address,
    is_clustered,
)
from penstock.telemetry.metrics import share_metrics
from penstock.telemetry.traces import Traces
from penstock.wire.encodings import encode_description
from penstock.wire.kept_view import KeptView
from penstock.wire.manager_connection import ManagerConnection

log = structlog.get_logger()
CATCH_UP_S = 10.0  # for the first update from the manager, and for workers to connect
MANAGERS_S = 3.0  # part of CATCH_UP_S: time for a manager to answer, before the gateway uses the state kept on disk


def _report_ready(run: RoleRun, asks_for_keys: bool, blocks: Sequence[BlockDescription]) -> None:
    """Report to the supervisor that the gateway is ready, with one block of each task."""
    blocks = sorted(blocks, key=lambda block: block.model)
    by_task = {block.settings.task: block for block in reversed(blocks)}
    chosen = [block for block in blocks if block is by_task[block.settings.task]]
    run.tether.report_ready(asks_for_keys, [encode_description(each) for each in chosen])


def run_gateway(start: RoleStart, http_port: int | None = None, grpc_port: int | None = None) -> None:
    """Run a gateway. The supervisor reserves its ports; without a supervisor (None) the gateway reserves them."""
    run_role("gateway", start, partial(_run, http_port, grpc_port))


async def _run(http_port: int | None, grpc_port: int | None, run: RoleRun) -> None:
    config, paths = run.config, run.paths
    share_metrics(paths.metrics, run.name)
    # The stack closes what is open if a later step fails; otherwise the process would not end.
    async with AsyncExitStack() as stack:
        if http_port is None or grpc_port is None:
            check_join(config)
            config.check_reach()
            check_bind(config)
            http_port, grpc_port = config.http_port, config.grpc_port
            if has_ports(config):
                http_port, grpc_port = reserve_ports(config, stack)
        certificates = open_certificates(config, stack)
        traces = Traces(config.telemetry, "penstock-gateway")
        stack.callback(traces.close)
        gateway = Gateway(run.name, config, traces)
        stack.push_async_callback(gateway.close)
        endpoint = gateway.listen(paths.get_gateway_endpoint(run.name, config))
        leader = open_leader(config, paths, stack)
        answered = gateway.answers.read if is_clustered(config) else lambda is_all: ()
        me = GatewayMember(run.name, endpoint, find_clients_address(config, grpc_port))
        counted, sessions = gateway.serving.plans.watches.take_counts, gateway.serving.sessions.count_sessions
        kept = KeptView(locate_kept_file(config, run.name, "state")) if is_clustered(config) else None
        control = ManagerConnection(leader, me, gateway.cluster_changed, counted, answered, sessions, kept)
        stack.push_async_callback(control.close)
        await gateway.catch_up(MANAGERS_S)
        if control.refusal is None:
            control.use_kept_view()
            await gateway.catch_up(CATCH_UP_S - MANAGERS_S)
        if control.refusal is not None:
            raise control.refusal
        has_edge = not run.is_supervised and needs_edge(config, not gateway.guard.is_open)
        if has_edge:
            config = config.model_copy(update={"edge_sockets": paths.folder})
        sockets = find_gateway_sockets(config, run.name)
        clients = await gateway.begin(control, certificates, paths.folder, sockets, partial(_report_ready, run))
        http_socket = open_http_socket(config.host, http_port) if sockets is None else open_unix_socket(sockets.http)
        await clients.open(grpc_port, http_socket, paths.metrics, gateway.publish_metrics, control.discover, leader)
        edge = None
        if has_edge:
            edge = await open_clients_edge(config, paths.folder, [run.name], http_port, grpc_port, certificates, stack)
        run.tether.report_open()
        if not run.is_supervised:
            announce_server(config, stack)
            http, grpc = Address(config.host, http_port), Address(config.host, grpc_port)
            log.info(
                "gateway_started",
                http=f"{choose_http_scheme(config)}://{http}",
                grpc=str(grpc),
                workers_endpoint=endpoint,
            )
        tune_garbage_collection()
        await run.stop.wait()
        if edge is not None:
            await edge.drain()
        await gateway.drain()
