"""Managers of one store in this process, each with its gRPC and its HTTP door."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.access.guard import Guard
from penstock.access.keys import KeyRecord
from penstock.app.registry import BehindDoor, open_http_door
from penstock.core.blocks import BlockState
from penstock.core.cluster.leaders import ManagerRecord
from penstock.core.config import RegistrySettings, load_config
from penstock.core.principals import Scope
from penstock.manager.access.audit import Audit, AuditedStore
from penstock.manager.access.keys import Keys
from penstock.manager.access.service import AccessService
from penstock.manager.deployed_block import WorkerState
from penstock.manager.direct.signing import Signing
from penstock.manager.leading.elected import ElectedManager
from penstock.manager.lives import WorkerArrived, WorkerHeard
from penstock.manager.manager import Manager, now
from penstock.manager.models.registry import ModelRegistry
from penstock.manager.models.service import ModelRegistryService
from penstock.manager.overview import Overview
from penstock.manager.reign import Facts, Load, Report
from penstock.manager.rollouts.runs import Rollouts
from penstock.manager.rollouts.service import RolloutService
from penstock.manager.server import serve_manager
from penstock.manager.telling.boards import AssignedBlock
from penstock.pb.v1 import access_pb2_grpc, cluster_pb2_grpc, registry_pb2_grpc
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.storage.objects.folder import FolderObjects
from penstock.telemetry.metrics import RolloutMetrics
from penstock.wire.channels import Channels
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader import Leader


class Place:
    """One of the managers, by its HTTP door."""

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

    async def join(self, worker: str, **facts: Any) -> None:
        arrived = WorkerArrived(worker, "1-life", int(worker[1:]))
        self.manager.reign.arrive(arrived, Facts(node=f"host-{worker}", **facts), Report([]), now())
        await self.work(worker)

    async def work(self, worker: str, load: Load | None = None) -> None:
        """It has loaded what it should."""
        given = self.manager.reign.boards.assignment(worker).items().values()
        states = [
            (each.block_id, WorkerState(BlockState.READY, "", each.revision, is_serving=True))
            for each in given
            if isinstance(each, AssignedBlock)
        ]
        self.manager.reign.hear(WorkerHeard(worker, int(worker[1:])), Report(states), load, now())
        await self.manager.notify()


async def _open(name: str, folder: Path, store: SqliteMetadataStore, stack: AsyncExitStack) -> Place:
    own = f"unix:{folder / name}.sock"
    manager = Manager(store, folder / "models", ManagerRecord(manager_id=name, address=own), is_fresh=True)
    stack.push_async_callback(manager.close)
    guard = Guard()
    keys, audit = Keys(manager, guard), Audit(manager, store)
    audited: Any = AuditedStore(store, audit)
    registry = ModelRegistry(audited, FolderObjects(folder / "objects"), folder / "uploads", RegistrySettings())
    rollouts = Rollouts(manager, RolloutMetrics(CollectorRegistry()))
    access, rolling = AccessService(keys, audit, Signing(manager, 1e9)), RolloutService(rollouts)
    manager.find_version = registry.choose
    manager.watched |= {"keys": access.statuses, "rollouts": rolling.statuses}
    Overview(manager)
    await manager.start(is_sole=name == "first")
    rollouts.start()
    stack.push_async_callback(rollouts.close)
    further = (
        partial(access_pb2_grpc.add_AccessServicer_to_server, access),
        partial(cluster_pb2_grpc.add_RolloutsServicer_to_server, rolling),
        partial(registry_pb2_grpc.add_ModelRegistryServicer_to_server, ModelRegistryService(registry)),
    )
    server = await serve_manager(manager, own, further=further, guard=guard)
    stack.push_async_callback(server.stop, None)
    leader = Leader(ElectedManager(manager, own), Channels(lambda: manager.managers_key()))
    stack.push_async_callback(leader.close)
    config = load_config(registry={"http_port": 0}, allowed_origins=["https://ui.example"])
    address = await open_http_door(config, BehindDoor(registry, guard, leader), "127.0.0.1", Certificates(), stack)
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
    """It leads."""
    return await _open("first", tmp_path, store, stack)


@pytest.fixture
async def follower(place: Place, tmp_path: Path, store: SqliteMetadataStore, stack: AsyncExitStack) -> Place:
    found = await _open("second", tmp_path, store, stack)
    await until(lambda: found.manager.election.leader is not None)
    return found
