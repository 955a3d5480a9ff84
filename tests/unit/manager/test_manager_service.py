"""The manager's service over a real socket, called like a gateway in another process does."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.peers.peer import find_free_ports
from benchmarks.waiting import until
from penstock.core.blocks import BlockView, ClusterView, GatewayMember
from penstock.core.config import Limits
from penstock.core.errors import ConfigError, InvalidRequest, UnknownModel
from penstock.core.settings import Routing
from penstock.endpoints.connection_limits import compute_max_grpc_connections
from penstock.manager import manager_server
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.pb.v1 import manager_pb2 as pb
from penstock.pb.v1 import manager_pb2_grpc
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from penstock.wire.manager_connection import ManagerConnection
from tests.hpack_bomb import PREFACE, SETTINGS, encode_frame
from tests.managers import make_manager

HASHED = Routing(policy="hash", key="user").model_dump_json()


class Gateway:
    """A gateway that watches the manager and waits for expected updates."""

    def __init__(self, address: str) -> None:
        self.views: Sequence[BlockView] = ()
        self.cluster_view = ClusterView(())
        self._changed = asyncio.Event()
        self.leader = LeaderClient(FixedLeader(address))
        self.control = ManagerConnection(self.leader, GatewayMember("gateway-1", "ipc://nowhere"), self._listen)

    async def until_routing(self, routing: str) -> None:
        async with asyncio.timeout(20):
            while [view.routing for view in self.views if view.model == "m"] != [routing]:
                self._changed.clear()
                await self._changed.wait()

    def _listen(self, cluster_view: ClusterView) -> None:
        self.views, self.cluster_view = cluster_view.blocks, cluster_view
        self._changed.set()


@pytest.fixture
async def gateway(address: str) -> AsyncIterator[Gateway]:
    watching = Gateway(address)
    yield watching
    await watching.control.close()
    await watching.leader.close()


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    for name in ("m", *(f"other-{number}" for number in range(20))):
        write_model(tmp_path / "models" / name)
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    managing = make_manager(store, tmp_path / "models", is_fresh=True)
    await managing.start()
    yield managing
    await managing.close()
    await store.close()


@pytest.fixture
async def address(tmp_path: Path, manager: Manager) -> AsyncIterator[str]:
    opened = f"unix:{tmp_path / 'manager.sock'}"
    server = await serve_manager(manager, opened)
    yield opened
    await server.stop(None)


def write_model(folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"never read here")
    (folder / "model.yaml").write_text("task: tensor\n")


async def test_routing_is_set_and_read_back(gateway: Gateway) -> None:
    await gateway.until_routing("")
    await gateway.control.set_routing("m", HASHED, "ops")
    await gateway.until_routing(HASHED)
    await gateway.control.set_routing("m", "", "ops")
    await gateway.until_routing("")


async def test_refusals_keep_their_type_message_and_fields(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"^the repository has no model 'nobody'$"):
        await gateway.control.set_routing("nobody", HASHED, "ops")
    with pytest.raises(UnknownModel, match=r"^the repository has no model 'nobody'$"):
        await gateway.control.unload("nobody", "ops")
    file = tmp_path / "models" / "m" / "model.yaml"
    file.write_text("tusk: tensor\n")
    with pytest.raises(ConfigError, match="tusk") as raised:
        await gateway.control.load("m", "ops")
    assert raised.value.fields["file"] == str(file)
    with pytest.raises(InvalidRequest, match="policy"):
        await gateway.control.set_routing("m", '{"policy": "nonsense"}', "ops")


# --- updates on the stream


class FakeWorker:
    """A worker that sends what the test says, and records what it receives."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.call = manager_pb2_grpc.ManagerStub(self.channel).Attach()

    async def say(self, **fields: Any) -> None:
        await self.call.write(pb.WorkerReport(worker_id="w", incarnation="1-life", **fields))

    async def hear(self) -> pb.Assignment:
        async with asyncio.timeout(20):
            found = await self.call.read()
        assert isinstance(found, pb.Assignment)
        return found

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


@pytest.fixture
async def worker(address: str) -> AsyncIterator[FakeWorker]:
    found = FakeWorker(address)
    yield found
    await found.close()


async def test_a_caller_without_an_identity_cannot_join(address: str) -> None:
    """Others would be notified of it, and connect to nowhere."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = manager_pb2_grpc.ManagerStub(channel)
        calls: list[Any] = [stub.Attach(iter([pb.WorkerReport()])), stub.Watch(iter([pb.WatchRequest(gateway_id="g")]))]
        for call in calls:
            async with asyncio.timeout(20):
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_gets_everything_once_and_then_changes(manager: Manager, worker: FakeWorker) -> None:
    await worker.say(is_snapshot=True)
    first = await worker.hear()
    assert (first.is_snapshot, len(first.blocks), first.has_gateways) == (True, 21, True)
    assert first.epoch == manager.control.epoch > 0
    loading = asyncio.create_task(manager.load("m"))
    then = await worker.hear()
    assert (then.is_snapshot, then.since, [block.model for block in then.blocks]) == (False, first.revision, ["m"])
    assert not then.has_gateways
    (block,) = then.blocks
    state = pb.BlockState(block_id=block.block_id, state="ready", revision=block.revision, is_serving=True)
    await worker.say(blocks=[state])
    await loading


async def test_a_worker_that_reports_a_gap_gets_everything_again(worker: FakeWorker) -> None:
    await worker.say(is_snapshot=True)
    await worker.hear()
    await worker.say(is_lost=True)
    assert len((await worker.hear()).blocks) == 21


async def test_a_returning_worker_gets_the_missed_changes(manager: Manager, address: str) -> None:
    before, after = FakeWorker(address), FakeWorker(address)
    await before.say(is_snapshot=True)
    heard = await before.hear()
    held = [
        pb.BlockState(block_id=block.block_id, state="ready", revision=block.revision, is_serving=True)
        for block in heard.blocks
    ]
    await before.say(blocks=held)
    await before.close()
    await manager.control.wait_until(lambda: not manager.control.term.blocks.list_workers())
    await after.say(is_snapshot=True, blocks=held, history=heard.history, epoch=heard.epoch, revision=heard.revision)
    missed = await after.hear()
    assert not missed.is_snapshot
    assert {block.revision for block in missed.blocks} <= {block.revision for block in heard.blocks}
    await after.close()


async def test_a_second_worker_with_the_same_name_is_refused_with_the_reason(worker: FakeWorker, address: str) -> None:
    await worker.say(is_snapshot=True)
    await worker.hear()
    second = FakeWorker(address)
    await second.call.write(pb.WorkerReport(worker_id="w", incarnation="2-life", is_snapshot=True))
    with pytest.raises(grpc.aio.AioRpcError, match="--node"):
        await second.hear()
    await second.close()


async def test_a_gateway_is_added_to_the_list_and_removed(manager: Manager, gateway: Gateway) -> None:
    await gateway.until_routing("")
    assert [each.gateway_id for each in manager.control.desired.gateways.list_members()] == ["gateway-1"]
    assert (gateway.cluster_view.membership, len(gateway.cluster_view.gateways)) == (
        manager.control.desired.membership,
        1,
    )
    await gateway.control.close()
    async with asyncio.timeout(20):
        await manager.control.wait_until(lambda: not manager.control.desired.gateways.list_members())


async def test_a_deposed_manager_closes_its_streams(manager: Manager, worker: FakeWorker) -> None:
    await worker.say(is_snapshot=True)
    await worker.hear()
    await manager.control.election.close()
    async with asyncio.timeout(20):
        assert await worker.call.read() is grpc.aio.EOF


async def test_connections_beyond_the_limit_are_closed_at_once(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_server, "raise_file_limit", lambda: 30)
    server = await serve_manager(manager, f"127.0.0.1:{(port := find_free_ports(1)[0])}")
    most = compute_max_grpc_connections(Limits(), 30)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * most)]
    for _, writer in opened:
        writer.write(PREFACE + encode_frame(SETTINGS, 0, 0))
    try:
        reading = [asyncio.create_task(reader.read()) for reader, _ in opened]  # the server's settings, or the end
        await until(lambda: sum(task.done() for task in reading) >= 2 * most - 1)
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for _, writer in opened:
            writer.transport.abort()
        await server.stop(None)
