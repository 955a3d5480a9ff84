"""All roles on this machine: manager and first gateway here, workers and further gateways as processes."""

import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
import uvloop

from penstock.app.gateway import Gateway
from penstock.app.places import ServerPlaces, task_worker_ids
from penstock.app.process import spare_collector, stop_on_signals
from penstock.app.supervisor import Supervisor
from penstock.core.config import Config
from penstock.gateway.http.server import check_port, open_http_socket
from penstock.manager.manager import Manager
from penstock.manager.service import serve_manager
from penstock.storage.metadata_sqlite import SqliteMetadata
from penstock.telemetry.logs import start_logs
from penstock.telemetry.metrics import forget_gauges, share_metrics
from penstock.telemetry.traces import Traces

log = structlog.get_logger()
OnListening = Callable[[str, str], None]
FIRST_GATEWAY = "gateway-0"  # in this process; the others are children


def run_serve(config: Config, on_listening: OnListening = lambda http, grpc: None) -> None:
    """`on_listening` is told the HTTP and gRPC addresses once they are open."""
    start_logs(config.telemetry, role="serve")
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        uvloop.run(_serve(config, ServerPlaces(folder), on_listening))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(config: Config, places: ServerPlaces, on_listening: OnListening) -> None:
    stop = stop_on_signals(signal.SIGTERM, signal.SIGINT)
    share_metrics(places.metrics, FIRST_GATEWAY)
    places.config.write_text(config.model_dump_json())
    check_port(config.host, config.http_port, "--http-port")
    check_port(config.host, config.grpc_port, "--grpc-port")
    http_socket = open_http_socket(config.host, config.http_port)
    http_port = http_socket.getsockname()[1]
    # What is open must close when a later step fails, or the process would not end.
    async with AsyncExitStack() as stack:
        manager = await _open_manager(config, places, stack)
        traces = Traces(config.telemetry, "penstock-gateway")
        stack.callback(traces.close)
        gateway = Gateway(FIRST_GATEWAY, config, places.metrics, traces)
        stack.push_async_callback(gateway.close)
        await manager.gateway_joined(FIRST_GATEWAY, gateway.listen(places.gateway(FIRST_GATEWAY)))
        manager.listen(gateway.cluster_changed)
        grpc_port = await gateway.open(manager, config.grpc_port, http_socket)
        supervisor = _start_children(config, places, http_port, grpc_port)
        host = f"[{config.host}]" if ":" in config.host else config.host
        http, grpc = f"http://{host}:{http_port}", f"{host}:{grpc_port}"
        on_listening(http, grpc)
        log.info(
            "serving", http=http, grpc=grpc, models=str(config.models), workers=config.workers, gateways=config.gateways
        )
        spare_collector()
        await stop.wait()
        log.info("stopping")
        await gateway.drain()
        await supervisor.stop(config.data_plane.drain_s + 5)


async def _open_manager(config: Config, places: ServerPlaces, stack: AsyncExitStack) -> Manager:
    metadata = await SqliteMetadata.open(config.data_dir / "metadata.db")
    stack.push_async_callback(metadata.close)
    manager = Manager(config.models, metadata)
    await manager.deploy_all()
    server = await serve_manager(manager, places.manager)
    stack.push_async_callback(server.stop, 0.5)
    return manager


def _start_children(config: Config, places: ServerPlaces, http_port: int, grpc_port: int) -> Supervisor:
    supervisor = Supervisor(
        config.data_plane.restart_backoff_s,
        config.data_plane.restart_backoff_max_s,
        on_exit=lambda name: forget_gauges(places.metrics, name),
    )
    for name in task_worker_ids(config):
        supervisor.keep(name, places.command("tasks", name))
    for index in range(config.workers):
        supervisor.keep(f"worker-{index}", places.command("worker", f"worker-{index}"))
    for index in range(1, config.gateways):
        ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
        supervisor.keep(f"gateway-{index}", places.command("gateway", f"gateway-{index}", *ports))
    return supervisor
