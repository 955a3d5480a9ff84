"""A worker between a real manager and a gateway's socket: its offers, and their times."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription, BlockState
from penstock.core.config import Config, TelemetrySettings, WorkerSettings
from penstock.core.tensors import Buffer
from penstock.features.admin.admin_service import ClusterService
from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.features.registry.sources import ModelSources
from penstock.manager.desired_state import GatewayRecord
from penstock.manager.manager_server import serve_manager
from penstock.manager.manager_service import ManagerService
from penstock.pb.v1 import job_pb2 as pb
from penstock.pb.v1.cluster_pb2 import RemoveWorkerRequest
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire import job_messages
from penstock.wire.channels import MANAGER_CHANNEL_OPTIONS, PLAIN_CHANNELS, Channels, Options
from penstock.wire.encodings import decode_description
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from penstock.wire.sockets import RouterSocket
from penstock.wire.zmq_endpoints import Endpoint
from penstock.worker import loop
from penstock.worker.loop import Worker
from tests.managers import list_block_views, make_manager
from tests.servers import write_identity

CROWD = 40
SETTINGS = WorkerSettings(zone="there", weights={"worker-7": 2.5})


class Gateway:
    """Answers hellos like a gateway, and records them."""

    def __init__(self, folder: Path) -> None:
        self.hellos: list[pb.Hello] = []
        self.handed_back: list[int] = []
        self.identity = b""
        self.has_parted = False
        self.socket = RouterSocket(self._on_message)
        self.endpoint = self.socket.bind(Endpoint(f"ipc://{folder / 'gateway.ipc'}"))

    def offers(self) -> dict[str, pb.BlockOffer]:
        return {offer.model: offer for offer in self.hellos[-1].blocks} if self.hellos else {}

    def described(self, model: str) -> BlockDescription:
        return decode_description(self.offers()[model].description)

    def send(self, header: pb.Header) -> None:
        self.socket.send(self.identity, job_messages.encode(header))

    def _on_message(self, identity: bytes, message: list[Buffer]) -> None:
        kind, header = job_messages.decode(message)
        self.identity = identity
        if kind == "hello":
            self.hellos.append(header.hello)
            self.send(pb.Header(welcome=pb.Welcome(gateway_id="gateway-0", beat_s=0.5)))
        elif kind == "hand_back":
            self.handed_back += header.hand_back.job_ids
        elif kind == "bye":
            self.has_parted = True


class Cluster:
    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self.folder, self.gateway, self.stop = folder, gateway, asyncio.Event()
        self.address = f"unix:{folder / 'manager.sock'}"
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.store = await SqliteMetadataStore.open(self.folder / "metadata.db")
        self.manager = make_manager(self.store, self.folder / "models")
        await self.manager.start()
        self.server = await serve_manager(self.manager, self.address)
        gateway = GatewayRecord(gateway_id="gateway-0", endpoint=self.gateway.endpoint)
        await self.manager.control.membership.add_gateway(1, gateway)

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
        return {view.model: view.state for view in list_block_views(self.manager)}


def make_worker(name: str, leader: LeaderClient) -> Worker:
    config = Config(worker=SETTINGS)
    metrics, traces = WorkerMetrics(CollectorRegistry()), Traces(TelemetrySettings(), "test")
    return Worker(name, leader, config, metrics, traces, ModelSources(config))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    write_identity(tmp_path / "models", "eager", "FP32", "instances: {count: 2}\nbatching: {max_rows: 4}\n")
    write_identity(tmp_path / "models", "lazy", "FP32", "instances: {count: 1}\nresidence: {load: lazy}\n")
    gateway = Gateway(tmp_path)
    found = Cluster(tmp_path, gateway)
    await found.start()
    leader = LeaderClient(FixedLeader(found.address))
    worker = make_worker("worker-7", leader)
    found.running = asyncio.create_task(worker.run(found.stop))
    await until(lambda: gateway.offers().keys() == {"eager", "lazy"})
    yield found
    await found.leave()
    await leader.close()
    gateway.socket.close(linger_ms=0)
    await found.close()


async def test_a_worker_offers_loaded_and_loadable_blocks(cluster: Cluster) -> None:
    hello, offers = cluster.gateway.hellos[-1], cluster.gateway.offers()
    assert (hello.worker_id, hello.zone) == ("worker-7", "there")
    eager, lazy = offers["eager"], offers["lazy"]
    assert (eager.is_dormant, eager.weight, eager.credits) == (False, 5.0, 16)
    assert (lazy.is_dormant, lazy.weight, lazy.credits) == (True, 2.5, 64)
    assert cluster.gateway.described("eager").is_described
    assert not cluster.gateway.described("lazy").is_described
    async with asyncio.timeout(30):
        settled = {"eager": BlockState.READY, "lazy": BlockState.DORMANT}
        await cluster.manager.control.wait_until(lambda: cluster.states() == settled)


async def test_a_wake_makes_the_worker_describe_the_block(cluster: Cluster) -> None:
    gateway = cluster.gateway
    gateway.send(pb.Header(wake=pb.Wake(block_id=gateway.offers()["lazy"].block_id)))
    await until(lambda: not gateway.offers()["lazy"].is_dormant)
    assert [spec.name for spec in gateway.described("lazy").inputs] == ["x"]
    async with asyncio.timeout(30):
        await cluster.manager.control.wait_until(lambda: cluster.states()["lazy"] is BlockState.READY)


async def test_a_stopping_worker_announces_no_blocks_and_hands_back_waiting_jobs(cluster: Cluster) -> None:
    gateway = cluster.gateway
    job = pb.Job(job_id=3, attempt=1, block_id=gateway.offers()["lazy"].block_id, timeout_us=30_000_000)
    gateway.send(pb.Header(job=job))
    cluster.stop.set()
    await until(lambda: not gateway.hellos[-1].blocks)
    await until(lambda: gateway.handed_back == [3])
    await cluster.leave()


async def test_a_restarted_manager_accepts_the_worker_as_it_is(cluster: Cluster) -> None:
    """Nothing is reloaded, no gateway is disconnected, and the new manager's requests are performed."""
    gateway = cluster.gateway
    await cluster.manager.control.wait_until(lambda: cluster.states()["eager"] is BlockState.READY)
    before = {view.model: view.block_id for view in list_block_views(cluster.manager)}
    hellos = len(gateway.hellos)
    await cluster.restart()
    manager = cluster.manager
    async with asyncio.timeout(30):
        settled = {"eager": BlockState.READY, "lazy": BlockState.DORMANT}
        await manager.control.wait_until(lambda: cluster.states() == settled)
    assert {view.model: view.block_id for view in list_block_views(manager)} == before
    assert len(gateway.hellos) == hellos, "the worker's blocks have not changed"
    await manager.load("eager")
    await manager.deployer.unload("lazy")
    await until(lambda: gateway.offers().keys() == {"eager"})


async def test_a_removed_worker_finishes_its_jobs_and_leaves(cluster: Cluster) -> None:
    await cluster.manager.control.wait_until(lambda: cluster.states()["eager"] is BlockState.READY)
    control = cluster.manager.control
    service = ClusterService(control, cluster.manager.deployer, ClusterOverview(control), PLAIN_CHANNELS)
    answer = await service.RemoveWorker(RemoveWorkerRequest(worker_id="worker-7"), None)
    assert not answer.HasField("failure")
    assert cluster.running is not None
    async with asyncio.timeout(30):
        await cluster.running
    assert not cluster.gateway.hellos[-1].blocks


async def test_a_gateway_that_managers_no_longer_list_is_served_while_its_link_is_alive(cluster: Cluster) -> None:
    gateway, manager = cluster.gateway, cluster.manager
    await manager.control.membership.stream_ended(1, "gateway-0", is_leaving=True)
    await manager.deployer.unload("eager")  # the worker reads this change after the one of the gateways
    await until(lambda: gateway.offers().keys() == {"lazy"})
    assert not gateway.has_parted
    gateway.send(pb.Header(wake=pb.Wake(block_id=gateway.offers()["lazy"].block_id)))
    await until(lambda: not gateway.offers()["lazy"].is_dormant)


async def test_a_gateway_that_managers_no_longer_list_and_that_stops_is_left(cluster: Cluster) -> None:
    gateway, manager = cluster.gateway, cluster.manager
    gateway.send(pb.Header(bye=pb.Bye(reason="the gateway stops")))
    await manager.control.membership.stream_ended(1, "gateway-0", is_leaving=True)
    await until(lambda: gateway.has_parted)


@pytest.fixture
def busy_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make managers read reports late, as one does that many workers leave at once."""
    receive = ManagerService._receive

    async def late(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            await asyncio.sleep(0.3)
            yield message

    def receive_late(self: ManagerService, messages: AsyncIterator[Any], *rest: Any) -> Any:
        return receive(self, late(messages), *rest)

    monkeypatch.setattr(ManagerService, "_receive", receive_late)
    monkeypatch.setattr(loop, "LEAVE_S", 80.0)  # all workers share one busy process with the manager here


class OwnConnections(Channels):
    """Channels that do not share one connection, like those of separate processes."""

    def open(self, address: str, options: Options = MANAGER_CHANNEL_OPTIONS) -> Any:
        return super().open(address, (*options, ("grpc.use_local_subchannel_pool", 1)))


async def test_workers_that_leave_at_once_are_all_removed_by_a_busy_manager(
    busy_manager: None, cluster: Cluster
) -> None:
    (port,) = find_free_ports(1)
    address = f"127.0.0.1:{port}"
    server = await serve_manager(cluster.manager, address)
    leaders = [LeaderClient(FixedLeader(address), OwnConnections()) for _ in range(CROWD)]
    crowd = {f"crowd-{number}": make_worker(f"crowd-{number}", leader) for number, leader in enumerate(leaders)}
    stop, lives = asyncio.Event(), cluster.manager.control.term.liveness.get_records()
    running = [asyncio.create_task(worker.run(stop)) for worker in crowd.values()]
    await until(lambda: all(worker.has_attached for worker in crowd.values()), within_s=80)
    assert crowd.keys() < lives.keys()
    stop.set()
    await asyncio.gather(*running, cluster.leave())
    await until(lambda: not lives, within_s=80)
    await asyncio.gather(*(leader.close() for leader in leaders))
    await server.stop(None)
