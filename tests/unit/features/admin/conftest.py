"""Managers of one store in this process, each with its gRPC and its HTTP endpoint."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.app.registry_endpoint import HttpServices, open_http_endpoint
from penstock.core.blocks import BlockState
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.core.config import RegistrySettings, load_config
from penstock.core.principals import Scope
from penstock.endpoints.guard import Guard
from penstock.features.admin.admin_service import ClusterService
from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.features.admin.cluster_watch import StatusSource
from penstock.features.keys.access_service import AccessService
from penstock.features.keys.audit import Audit, AuditedStore
from penstock.features.keys.key_table import KeyRecord
from penstock.features.keys.keys import Keys
from penstock.features.keys.signing import Signing
from penstock.features.registry.model_registry import ModelRegistry
from penstock.features.registry.registry_service import ModelRegistryService
from penstock.features.rollouts.rollout_service import RolloutService
from penstock.features.rollouts.rollouts import Rollouts
from penstock.manager.control_plane import ControlPlane, now
from penstock.manager.deployed_block import WorkerState
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.leading.elected_manager import ElectedManager
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.manager.publishing.publisher import AssignedBlock
from penstock.manager.term import BlocksReport, WorkerFacts, WorkerLoad
from penstock.manager.worker_liveness import WorkerArrived, WorkerReported
from penstock.pb.v1 import access_pb2_grpc, cluster_pb2_grpc, registry_pb2_grpc
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.storage.objects.folder_objects import FolderObjects
from penstock.telemetry.metrics import RolloutMetrics
from penstock.wire.channels import Channels
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader_connection import FixedLeader, LeaderClient


class ManagedWorkers:
    """Workers that a test reports to a manager in place of real ones."""

    manager: Manager

    async def join(self, worker: str, **facts: Any) -> None:
        arrived = WorkerArrived(worker, "1-life", int(worker[1:]))
        self.manager.control.term.worker_joined(
            arrived, WorkerFacts(node=f"host-{worker}", **facts), BlocksReport([]), now()
        )
        await self.work(worker)

    async def work(self, worker: str, load: WorkerLoad | None = None) -> None:
        """Report all blocks assigned to a worker as ready, and no others."""
        given = self.manager.control.term.publisher.get_assignment(worker).get_items().values()
        states = [
            (each.block_id, WorkerState(BlockState.READY, "", each.revision, is_serving=True))
            for each in given
            if isinstance(each, AssignedBlock)
        ]
        self.manager.control.term.worker_reported(
            WorkerReported(worker, int(worker[1:])), BlocksReport(states), load, now()
        )
        await self.manager.control.notify()


class Place(ManagedWorkers):
    """One of the managers, by its HTTP endpoint."""

    def __init__(self, manager: Manager, keys: Keys, http: httpx.AsyncClient, address: str) -> None:
        self.manager, self.keys, self.http, self.address = manager, keys, http, address

    async def call(self, method: str, path: str, body: Any = None, key: str = "", **headers: str) -> httpx.Response:
        shown = {"authorization": f"Bearer {key}"} if key else {}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(method, f"/v1/admin{path}", json=body, headers={**shown, **sent})

    async def get(self, path: str, key: str = "", **query: Any) -> Any:
        shown = {"authorization": f"Bearer {key}"} if key else {}
        answer = await self.http.get(f"/v1/admin{path}", params=query, headers=shown)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def key(self, name: str, *scopes: Scope) -> str:
        wanted = KeyRecord(key_id="key", name=name, digest="", scopes=frozenset(scopes))
        return (await self.keys.create(wanted)).text


async def _open(name: str, folder: Path, store: SqliteMetadataStore, stack: AsyncExitStack) -> Place:
    own = f"unix:{folder / name}.sock"
    guard, audit = Guard(), Audit(store)
    control = ControlPlane(store, ManagerRecord(manager_id=name, address=own), plan_audit=audit.plan)
    audited: Any = AuditedStore(store, audit)
    registry = ModelRegistry(audited, FolderObjects(folder / "objects"), folder / "uploads", RegistrySettings())
    keys, overview, deployer = (
        Keys(control, guard),
        ClusterOverview(control),
        Deployer(control, folder / "models", registry.choose),
    )
    rollouts = Rollouts(control, deployer, RolloutMetrics(CollectorRegistry()))
    manager = Manager(control, deployer, [keys, audit, rollouts, overview], is_fresh=True)
    stack.push_async_callback(manager.close)
    await manager.start(is_sole=name == "first")
    managers = Channels(lambda: keys.managers_key)
    access, rolling = AccessService(keys, audit, Signing(control, 1e9)), RolloutService(rollouts)
    watched: dict[str, StatusSource] = {"keys": access.list_statuses, "rollouts": rolling.list_statuses}
    cluster = ClusterService(control, deployer, overview, managers, watched)
    services = (
        partial(cluster_pb2_grpc.add_ClusterServicer_to_server, cluster),
        partial(access_pb2_grpc.add_AccessServicer_to_server, access),
        partial(cluster_pb2_grpc.add_RolloutsServicer_to_server, rolling),
        partial(registry_pb2_grpc.add_ModelRegistryServicer_to_server, ModelRegistryService(registry)),
    )
    server = await serve_manager(manager, own, services=services, guard=guard)
    stack.push_async_callback(server.stop, None)
    leader = LeaderClient(ElectedManager(control, own), managers)
    reads = LeaderClient(FixedLeader(own), managers)
    for each in (leader, reads):
        stack.push_async_callback(each.close)
    config = load_config(registry={"http_port": 0}, allowed_origins=["https://ui.example"])
    address = await open_http_endpoint(
        config, HttpServices(registry, guard, leader, reads), "127.0.0.1", Certificates(), stack
    )
    http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{address}", timeout=20))
    return Place(manager, keys, http, str(address))


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[AsyncExitStack]:
    for model in ("m", "n"):
        for version in ("1", "2"):
            (tmp_path / "models" / model / version).mkdir(parents=True)
            (tmp_path / "models" / model / version / "model.onnx").write_bytes(b"never read here")
        (tmp_path / "models" / model / "model.yaml").write_text("task: tensor\n")
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def store(tmp_path: Path, stack: AsyncExitStack) -> SqliteMetadataStore:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    stack.push_async_callback(store.close)
    return store


@pytest.fixture
async def place(tmp_path: Path, store: SqliteMetadataStore, stack: AsyncExitStack) -> Place:
    """Return a manager that leads."""
    return await _open("first", tmp_path, store, stack)


@pytest.fixture
async def follower(place: Place, tmp_path: Path, store: SqliteMetadataStore, stack: AsyncExitStack) -> Place:
    found = await _open("second", tmp_path, store, stack)
    await until(lambda: found.manager.control.election.leader is not None)
    return found
