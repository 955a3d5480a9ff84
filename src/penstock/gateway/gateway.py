"""The gateway: its parts, joined, with a start and a gentle stop."""

import asyncio
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from penstock.core.cluster import BlockView, Control
from penstock.core.config import Config, Limits
from penstock.core.errors import ConfigError, PenstockError
from penstock.gateway.catalogue import Catalogue
from penstock.gateway.grpc.oip import OipGrpc
from penstock.gateway.grpc.server import ENVELOPE_BYTES, GrpcServer
from penstock.gateway.grpc.shared_memory import SharedMemoryGrpc
from penstock.gateway.http.app import HttpApp, build_http_app
from penstock.gateway.http.connection import InferProtocol
from penstock.gateway.http.live import standing
from penstock.gateway.http.live_streams import LiveStreams
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.streams.websocket_protocol import StreamProtocol
from penstock.models.settings import Routing
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.cache.responses import ResponseCache
from penstock.serving.resolve import Resolver
from penstock.serving.serve import Serving
from penstock.serving.sessions.runs import SessionRuns
from penstock.storage.cache.store import open_store
from penstock.telemetry.metrics import CacheMetrics, RouterMetrics, ServingMetrics, SessionMetrics, shared_registry
from penstock.telemetry.snapshot import SnapshotReader
from penstock.telemetry.traces import Traces

log = structlog.get_logger()
WATCH_S = 0.25
CATCH_UP_S = 10.0


class Gateway:
    def __init__(self, gateway_id: str, config: Config, metrics_folder: Path, traces: Traces) -> None:
        self.gateway_id = gateway_id
        self._config = config
        self._metrics_folder = metrics_folder
        registry = CollectorRegistry()
        self._serving_metrics = ServingMetrics(registry)
        self._router_metrics = RouterMetrics(registry)
        self._admission = Admission(config.limits)
        self._resolver = Resolver()
        self._dispatcher = Dispatcher(
            gateway_id,
            config.data_plane,
            self._router_metrics,
            self._workers_changed,
            config.worker.zone,
            lambda worker, blocks: self._sessions.lost(worker, blocks),
        )
        self._cache = ResponseCache(
            open_store(config.response_cache, gateway_id, config.data_dir),
            config.response_cache,
            CacheMetrics(registry),
        )
        self._sessions = SessionRuns()
        self._session_metrics = SessionMetrics(registry)
        self._serving = Serving(
            self._admission,
            self._resolver,
            self._cache,
            self._sessions,
            self._dispatcher,
            self._serving_metrics,
            traces,
        )
        self._grpc: GrpcServer | None = None
        self._http: uvicorn.Server | None = None
        self._live: LiveStreams | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._process = psutil.Process()

    def listen(self, endpoint: str) -> str:
        """Opens the workers' door; the endpoint goes to the manager, who tells the workers."""
        return self._dispatcher.start(endpoint)

    def cluster_changed(self, views: Sequence[BlockView]) -> None:
        self._dispatcher.set_routings(
            {view.block_id: Routing.model_validate_json(view.routing) for view in views if view.routing}
        )
        self._serving.plans.routing_changed()
        self._retire(self._resolver.cluster_changed(views))

    async def catch_up(self) -> None:
        """Waits until it knows what the cluster serves: one that comes later shares its ports with others who do."""
        deadline = asyncio.get_running_loop().time() + CATCH_UP_S
        while not self._resolver.has_caught_up() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def open(self, control: Control, grpc_port: int, http_socket: socket.socket) -> int:
        """Opens the clients' doors. Returns the gRPC port."""
        limits = self._config.limits
        await self._cache.start()
        catalogue = Catalogue(self._admission, self._resolver, self._dispatcher, control)
        memory = SharedMemory(self._metrics_folder.parent / "shared-memory", max_request_bytes=limits.max_message_bytes)
        self._grpc = GrpcServer(OipGrpc(self._serving, catalogue, memory), limits, SharedMemoryGrpc(memory))
        port = await self._grpc.start(self._config.host, grpc_port)
        reader = SnapshotReader(self._metrics_folder)
        self._live = LiveStreams(reader.read, self._publish, lambda: standing(catalogue))
        app = build_http_app(
            self._serving, catalogue, limits, lambda: shared_registry(self._metrics_folder), self._live, memory
        )
        self._http = _http_server(app, limits)
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[http_socket]), name="http"),
            asyncio.create_task(self._watch(catalogue.is_server_ready), name="gateway-watch"),
        ]
        return port

    async def drain(self) -> None:
        """Admits no more and lets what is inside end."""
        self._admission.is_draining = True
        self._sessions.drain()
        if self._grpc is not None:
            await self._grpc.set_ready(False)
        deadline = asyncio.get_running_loop().time() + self._config.data_plane.drain_s
        while self._admission.inflight_requests and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self._live is not None:
            self._live.close()  # an endless answer would hold the HTTP server open
        if self._http is not None:
            self._http.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(grace_s=1.0)
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=3.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sessions.close()
        await self._cache.close()
        await self._dispatcher.stop()

    def _workers_changed(self) -> None:
        self._retire(self._resolver.workers_changed(self._dispatcher.descriptions()))

    def _retire(self, gone: dict[str, PenstockError]) -> None:
        for block_id, error in gone.items():
            self._sessions.retire(block_id, error)
            self._dispatcher.retire(block_id, error)

    async def _watch(self, is_ready: Callable[[], bool]) -> None:
        """Keeps the health service and the gauges true."""
        was_ready = None
        while True:
            ready = is_ready()
            if ready is not was_ready and self._grpc is not None:
                was_ready = ready
                await self._grpc.set_ready(ready)
                log.info("readiness", ready=ready)
            self._publish()
            await asyncio.sleep(WATCH_S)

    def _publish(self) -> None:
        """Brings this gateway's part of the shared metrics up to date."""
        self._serving.plans.tallies.flush()
        self._cache.publish()
        self._serving_metrics.inflight_requests.set(self._admission.inflight_requests)
        self._serving_metrics.inflight_bytes.set(self._admission.inflight_bytes)
        self._serving_metrics.memory_bytes.set(self._process.memory_info().rss)
        self._sessions.tick()
        sessions = self._sessions.statistics()
        self._session_metrics.open.set(sessions["open"])
        self._session_metrics.waiting.set(sessions["waiting"])
        self._session_metrics.repeats.set(sessions["repeats"])
        self._router_metrics.workers.set(len(self._dispatcher.workers()))
        for block_id, (waiting, running) in self._dispatcher.queue_lengths().items():
            self._router_metrics.queue.labels(block_id, "waiting").set(waiting)
            self._router_metrics.queue.labels(block_id, "running").set(running)


def check_port(host: str, port: int, flag: str) -> None:
    """SO_REUSEPORT would let a second server share the port in silence, so look before it is opened so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from error


def open_http_socket(host: str, port: int) -> socket.socket:
    """Shared by the gateways of one machine through SO_REUSEPORT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"cannot listen for HTTP on {host}:{port}: {error.strerror}; choose another --http-port"
        ) from error
    return opened


def _http_server(app: HttpApp, limits: Limits) -> uvicorn.Server:
    config = uvicorn.Config(
        cast("uvicorn._types.ASGIApplication", app),
        http=cast(type[asyncio.Protocol], partial(InferProtocol, app.infer)),
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=2048,
        timeout_keep_alive=75,
        ws=StreamProtocol,
        ws_max_size=limits.max_message_bytes + ENVELOPE_BYTES,
        ws_per_message_deflate=False,
    )
    return _HttpServer(config)


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are not this door's: what is inside ends before it closes."""
        yield
