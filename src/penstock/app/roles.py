"""The only wiring: builds the roles from the configuration, starts and stops them."""

import asyncio
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from penstock.app.supervisor import Supervisor
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.gateway.gateway import Gateway, check_port, open_http_socket
from penstock.manager.manager import Manager
from penstock.manager.service import serve_manager
from penstock.storage.metadata_sqlite import SqliteMetadata
from penstock.telemetry.logs import start_logs
from penstock.telemetry.metrics import WorkerMetrics, forget_gauges, share_metrics
from penstock.telemetry.traces import Traces
from penstock.wire.control import RemoteControl

log = structlog.get_logger()
PR_SET_PDEATHSIG = 1


class Places:
    """Where one running server keeps its sockets, its resolved configuration and its metrics."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.metrics = folder / "metrics"
        self.manager = f"unix:{folder / 'manager.sock'}"

    def gateway(self, gateway_id: str) -> str:
        return f"ipc://{self.folder / gateway_id}.ipc"

    def tasks(self, task_worker_id: str) -> Path:
        return self.folder / f"{task_worker_id}.sock"


def run_serve(config: Config, on_listening: Callable[[str, str], None] = lambda http, grpc: None) -> None:
    """All roles on this machine: manager and gateway here, workers and further gateways as processes.

    `on_listening` is told the HTTP and gRPC addresses once they are open.
    """
    start_logs(config.telemetry, role="serve")
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        uvloop.run(_serve(config, Places(folder), on_listening))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_worker(worker_id: str, places: Places) -> None:
    config = _child_config(places)
    start_logs(config.telemetry, role="worker", worker=worker_id)
    share_metrics(places.metrics, worker_id)
    uvloop.run(_worker(worker_id, config, places))


def run_task_worker(task_worker_id: str, places: Places) -> None:
    config = _child_config(places)
    start_logs(config.telemetry, role="tasks", task_worker=task_worker_id)
    uvloop.run(_task_worker(task_worker_id, config, places))


def run_gateway(gateway_id: str, http_port: int, grpc_port: int, places: Places) -> None:
    config = _child_config(places).model_copy(update={"http_port": http_port, "grpc_port": grpc_port})
    start_logs(config.telemetry, role="gateway", gateway=gateway_id)
    share_metrics(places.metrics, gateway_id)
    uvloop.run(_gateway(gateway_id, config, places))


async def _serve(config: Config, places: Places, on_listening: Callable[[str, str], None]) -> None:
    stop = _stop_on_signals(signal.SIGTERM, signal.SIGINT)
    # What is open must close when a later step fails, or the process would not end.
    async with AsyncExitStack() as stack:
        await _run_roles(config, places, stack, stop, on_listening)


async def _run_roles(
    config: Config,
    places: Places,
    stack: AsyncExitStack,
    stop: asyncio.Event,
    on_listening: Callable[[str, str], None],
) -> None:
    share_metrics(places.metrics, "gateway-0")
    places.config.write_text(config.model_dump_json())
    check_port(config.host, config.http_port, "--http-port")
    check_port(config.host, config.grpc_port, "--grpc-port")
    http_socket = open_http_socket(config.host, config.http_port)
    http_port = http_socket.getsockname()[1]
    metadata = await SqliteMetadata.open(config.data_dir / "metadata.db")
    stack.push_async_callback(metadata.close)
    manager = Manager(config.models, metadata)
    await manager.deploy_all()
    manager_server = await serve_manager(manager, places.manager)
    stack.push_async_callback(manager_server.stop, 0.5)
    traces = Traces(config.telemetry, "penstock-gateway")
    stack.callback(traces.close)
    gateway = Gateway("gateway-0", config, places.metrics, traces)
    stack.push_async_callback(gateway.close)
    await manager.gateway_joined("gateway-0", gateway.listen(places.gateway("gateway-0")))
    manager.listen(gateway.cluster_changed)
    grpc_port = await gateway.open(manager, config.grpc_port, http_socket)
    supervisor = Supervisor(
        config.data_plane.restart_backoff_s,
        config.data_plane.restart_backoff_max_s,
        on_exit=lambda name: forget_gauges(places.metrics, name),
    )
    for name in _task_worker_ids(config):
        supervisor.keep(name, _command("tasks", name, places))
    for index in range(config.workers):
        supervisor.keep(f"worker-{index}", _command("worker", f"worker-{index}", places))
    for index in range(1, config.gateways):
        ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
        supervisor.keep(f"gateway-{index}", _command("gateway", f"gateway-{index}", places, *ports))
    host = f"[{config.host}]" if ":" in config.host else config.host
    http, grpc = f"http://{host}:{http_port}", f"{host}:{grpc_port}"
    on_listening(http, grpc)
    log.info(
        "serving",
        http=http,
        grpc=grpc,
        models=str(config.models),
        workers=config.workers,
        gateways=config.gateways,
    )
    _spare_collector()
    await stop.wait()
    log.info("stopping")
    await gateway.drain()
    await supervisor.stop(config.data_plane.drain_s + 5)


async def _worker(worker_id: str, config: Config, places: Places) -> None:
    from penstock.worker.loop import Worker

    stop = _stop_on_signals(signal.SIGTERM)
    _stop_with_parent()
    traces = Traces(config.telemetry, "penstock-worker")
    _spare_collector()
    metrics = WorkerMetrics(CollectorRegistry())
    task_workers = [places.tasks(name) for name in _task_worker_ids(config)]
    await Worker(worker_id, places.manager, config, metrics, traces, task_workers).run(stop)
    traces.close()


async def _task_worker(task_worker_id: str, config: Config, places: Places) -> None:
    from penstock.worker.offload.task_worker import TaskWorker

    stop = _stop_on_signals(signal.SIGTERM)
    _stop_with_parent()
    _spare_collector()
    await TaskWorker(places.tasks(task_worker_id)).run(stop, config.data_plane.drain_s)


async def _gateway(gateway_id: str, config: Config, places: Places) -> None:
    stop = _stop_on_signals(signal.SIGTERM)
    _stop_with_parent()
    traces = Traces(config.telemetry, "penstock-gateway")
    gateway = Gateway(gateway_id, config, places.metrics, traces)
    endpoint = gateway.listen(places.gateway(gateway_id))
    control = RemoteControl(places.manager, gateway_id, endpoint, gateway.cluster_changed)
    await gateway.catch_up()
    await gateway.open(control, config.grpc_port, open_http_socket(config.host, config.http_port))
    _spare_collector()
    await stop.wait()
    await gateway.drain()
    await control.close()
    await gateway.close()
    traces.close()


def _spare_collector() -> None:
    """What was made at the start stays: the collector need not look at it again, nor often at what comes and goes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _child_config(places: Places) -> Config:
    try:
        return Config.model_validate_json(places.config.read_text())
    except OSError as error:
        raise ConfigError(f"{places.config}: no server runs there: {error.strerror}") from error


def _command(role: str, name: str, places: Places, *flags: str) -> list[str]:
    return [sys.executable, "-m", "penstock", role, "--id", name, "--run-dir", str(places.folder), *flags]


def _task_worker_ids(config: Config) -> list[str]:
    return [f"tasks-{index}" for index in range(config.worker.task_workers)]


def _stop_on_signals(*numbers: int) -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    return stop


def _stop_with_parent() -> None:
    """A child must not outlive its server, however that ends; nor leave before it.

    Ctrl-C reaches every process of a terminal, but what is inside needs its workers until the gateway has drained.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
