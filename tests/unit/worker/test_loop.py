"""A worker between a real manager and a gateway's socket: what it offers, and when."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription, BlockState
from penstock.core.config import Config, Telemetry, WorkerSettings
from penstock.core.tensors import Buffer
from penstock.manager.admin.service import ClusterService
from penstock.manager.desired import GatewayRecord
from penstock.manager.manager import Manager
from penstock.manager.server import serve_manager
from penstock.pb.v1 import job_pb2 as pb
from penstock.pb.v1.cluster_pb2 import RemoveWorkerRequest
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire import frames
from penstock.wire.credentials.files import NO_FILES
from penstock.wire.endpoints import Endpoint
from penstock.wire.forms import decode_description
from penstock.wire.leader import Leader, SoleManager
from penstock.wire.sockets import RouterSocket
from penstock.worker.loop import Worker
from tests.servers import write_identity

SETTINGS = WorkerSettings(zone="here", zones={"worker-7": "there"}, weights={"worker-7": 2.5})


class Gateway:
    """Answers hellos as a gateway does, and keeps them."""

    def __init__(self, folder: Path) -> None:
        self.hellos: list[pb.Hello] = []
        self.handed_back: list[int] = []
        self.identity = b""
        self.socket = RouterSocket(self._on_message)
        self.endpoint = self.socket.bind(Endpoint(f"ipc://{folder / 'gateway.ipc'}"))

    def offers(self) -> dict[str, pb.BlockOffer]:
        return {offer.model: offer for offer in self.hellos[-1].blocks} if self.hellos else {}

    def described(self, model: str) -> BlockDescription:
        return decode_description(self.offers()[model].description)

    def send(self, frame: pb.Frame) -> None:
        self.socket.send(self.identity, frames.encode(frame))

    def _on_message(self, identity: bytes, message: list[Buffer]) -> None:
        kind, frame = frames.decode(message)
        self.identity = identity
        if kind == "hello":
            self.hellos.append(frame.hello)
            self.send(pb.Frame(welcome=pb.Welcome(gateway_id="gateway-0", beat_s=0.5)))
        elif kind == "hand_back":
            self.handed_back += frame.hand_back.job_ids


class Cluster:
    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self.folder, self.gateway, self.stop = folder, gateway, asyncio.Event()
        self.address = f"unix:{folder / 'manager.sock'}"
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.store = await SqliteMetadataStore.open(self.folder / "metadata.db")
        self.manager = Manager(self.store, self.folder / "models")
        await self.manager.start()
        self.server = await serve_manager(self.manager, self.address)
        gateway = GatewayRecord(gateway_id="gateway-0", endpoint=self.gateway.endpoint)
        await self.manager.membership.joined(1, gateway)

    async def close(self) -> None:
        await self.server.stop(None)
        await self.manager.close()
        await self.store.close()

    async def restart(self) -> None:
        await self.close()
        await self.start()

    async def leave(self) -> None:
        self.stop.set()
        assert self.running is not None
        await self.running

    def states(self) -> dict[str, BlockState]:
        return {view.model: view.state for view in self.manager.view()}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    write_identity(tmp_path / "models", "eager", "FP32", "instances: {count: 2}\nbatching: {max_rows: 4}\n")
    write_identity(tmp_path / "models", "lazy", "FP32", "instances: {count: 1}\nresidence: {load: lazy}\n")
    gateway = Gateway(tmp_path)
    found = Cluster(tmp_path, gateway)
    await found.start()
    metrics, traces = WorkerMetrics(CollectorRegistry()), Traces(Telemetry(), "test")
    leader = Leader(SoleManager(found.address))
    worker = Worker("worker-7", leader, Config(worker=SETTINGS), metrics, traces)
    found.running = asyncio.create_task(worker.run(found.stop))
    await until(lambda: gateway.offers().keys() == {"eager", "lazy"})
    yield found
    await found.leave()
    await leader.close()
    gateway.socket.close(linger_ms=0)
    await found.close()


async def test_it_offers_what_it_has_and_what_it_would_load(cluster: Cluster) -> None:
    hello, offers = cluster.gateway.hellos[-1], cluster.gateway.offers()
    assert (hello.worker_id, hello.zone) == ("worker-7", "there")
    eager, lazy = offers["eager"], offers["lazy"]
    assert (eager.is_dormant, eager.weight, eager.credits) == (False, 5.0, 16)
    assert (lazy.is_dormant, lazy.weight, lazy.credits) == (True, 2.5, 64)
    assert cluster.gateway.described("eager").is_described
    assert not cluster.gateway.described("lazy").is_described
    async with asyncio.timeout(30):
        settled = {"eager": BlockState.READY, "lazy": BlockState.DORMANT}
        await cluster.manager.wait_until(lambda: cluster.states() == settled)


async def test_a_wake_makes_it_tell_more(cluster: Cluster) -> None:
    gateway = cluster.gateway
    gateway.send(pb.Frame(wake=pb.Wake(block_id=gateway.offers()["lazy"].block_id)))
    await until(lambda: not gateway.offers()["lazy"].is_dormant)
    assert [spec.name for spec in gateway.described("lazy").inputs] == ["x"]
    async with asyncio.timeout(30):
        await cluster.manager.wait_until(lambda: cluster.states()["lazy"] is BlockState.READY)


async def test_it_leaves_with_an_empty_hello_and_what_waits(cluster: Cluster) -> None:
    gateway = cluster.gateway
    job = pb.Job(job_id=3, attempt=1, block_id=gateway.offers()["lazy"].block_id, timeout_us=30_000_000)
    gateway.send(pb.Frame(job=job))
    cluster.stop.set()
    await until(lambda: not gateway.hellos[-1].blocks)
    await until(lambda: gateway.handed_back == [3])
    await cluster.leave()


async def test_a_manager_that_comes_back_takes_the_worker_back_as_it_is(cluster: Cluster) -> None:
    """Nothing is loaded anew, no gateway is left, and what the new manager is asked it does."""
    gateway = cluster.gateway
    await cluster.manager.wait_until(lambda: cluster.states()["eager"] is BlockState.READY)
    before = {view.model: view.block_id for view in cluster.manager.view()}
    hellos = len(gateway.hellos)
    await cluster.restart()
    manager = cluster.manager
    async with asyncio.timeout(30):
        settled = {"eager": BlockState.READY, "lazy": BlockState.DORMANT}
        await manager.wait_until(lambda: cluster.states() == settled)
    assert {view.model: view.block_id for view in manager.view()} == before
    assert len(gateway.hellos) == hellos, "nothing has changed for it"
    await manager.load("eager")
    await manager.unload("lazy")
    await until(lambda: gateway.offers().keys() == {"eager"})


async def test_a_worker_that_is_removed_ends_what_it_runs_and_leaves(cluster: Cluster) -> None:
    await cluster.manager.wait_until(lambda: cluster.states()["eager"] is BlockState.READY)
    service = ClusterService(cluster.manager, NO_FILES)
    answer = await service.RemoveWorker(RemoveWorkerRequest(worker_id="worker-7"), None)
    assert not answer.HasField("failure")
    assert cluster.running is not None
    async with asyncio.timeout(30):
        await cluster.running
    assert not cluster.gateway.hellos[-1].blocks
