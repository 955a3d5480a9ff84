"""Runs a whole server in one process: a manager, a gateway and a worker on the test's event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.app.gateway.client_endpoints import ClientEndpoints
from penstock.app.gateway.gateway import Gateway
from penstock.app.ports import open_http_socket
from penstock.core.blocks import BlockState, GatewayMember
from penstock.core.config import Config, TelemetrySettings, WorkerSettings
from penstock.endpoints.guard import Guard
from penstock.features.registry.sources import ModelSources
from penstock.manager.manager_server import serve_manager
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from penstock.wire.manager_connection import ManagerConnection
from penstock.wire.zmq_endpoints import Endpoint
from penstock.worker.loop import Worker
from tests.managers import list_block_views, make_manager


@dataclass(frozen=True, slots=True)
class RunningRoles:
    gateway: Gateway
    endpoints: ClientEndpoints
    grpc: str
    http: str  # host and port


@asynccontextmanager
async def roles_running(
    folder: Path, models: Path, guard: Guard | None = None, **settings: Any
) -> AsyncIterator[RunningRoles]:
    without_trials = WorkerSettings(engine_trial_s=0)
    config = Config(models=models, data_dir=folder / "data", **{"worker": without_trials, **settings})
    traces = Traces(TelemetrySettings(), "test")
    async with AsyncExitStack() as stack:
        store = await SqliteMetadataStore.open(config.data_dir / "metadata.db")
        stack.push_async_callback(store.close)
        manager = make_manager(store, config.models, is_fresh=True)
        stack.push_async_callback(manager.close)
        await manager.start()
        control = f"unix:{folder / 'manager.sock'}"
        server = await serve_manager(manager, control)
        stack.push_async_callback(server.stop, None)
        gateway = Gateway("gateway-0", config, traces, guard)
        stack.push_async_callback(gateway.close)
        endpoint = gateway.listen(Endpoint(f"ipc://{folder / 'gateway.ipc'}"))
        leader = LeaderClient(FixedLeader(control))
        stack.push_async_callback(leader.close)
        remote = ManagerConnection(leader, GatewayMember("gateway-0", endpoint), gateway.cluster_changed)
        stack.push_async_callback(remote.close)
        http = open_http_socket(config.host, 0)
        endpoints = await gateway.begin(remote, Certificates(), folder)
        port = await endpoints.open(0, http, folder / "metrics", gateway.publish_metrics)
        stop = asyncio.Event()
        worker = Worker("worker-0", leader, config, WorkerMetrics(CollectorRegistry()), traces, ModelSources(config))
        running = asyncio.create_task(worker.run(stop))
        await manager.control.wait_until(
            lambda: all(view.state is BlockState.READY for view in list_block_views(manager))
        )
        await gateway.catch_up(10.0)
        yield RunningRoles(gateway, endpoints, f"{config.host}:{port}", f"{config.host}:{http.getsockname()[1]}")
        stop.set()
        await running
