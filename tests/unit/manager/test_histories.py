"""A store that was wiped or restored while workers and gateways run: they start over with its new history."""

import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockState, ClusterView, GatewayMember
from penstock.core.cluster.access_view import AccessView
from penstock.core.config import Config, WorkerSettings
from penstock.core.errors import NotLeader
from penstock.core.settings import Routing
from penstock.core.statistics import BlockStatistics
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.manager.worker_liveness import LivenessRules
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.background import BackgroundTasks
from penstock.wire.leader_connection import LeaderClient
from penstock.wire.leader_search import LeaderSearch
from penstock.wire.manager_connection import ManagerConnection
from penstock.worker.attachment import Attachment
from penstock.worker.residency.residency import HeldBlock
from penstock.worker.residency.residency_actions import BlockAssignment
from penstock.worker.residency.worker_blocks import WorkCounts
from penstock.worker.worker_machine import BlockGpuMemory, Machine
from tests.managers import make_manager

QUICK = LivenessRules(offline_s=0.5)  # how long a manager waits for workers and gateways of an earlier manager
HASHED = Routing(policy="hash", key="user").model_dump_json()


class Bed:
    """A worker and a gateway that outlive their manager."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "metadata.db"
        self.address = f"unix:{folder / 'manager.sock'}"
        self.repository = folder / "models"
        (self.repository / "m" / "1").mkdir(parents=True)
        (self.repository / "m" / "1" / "model.onnx").write_bytes(b"never read here")
        (self.repository / "m" / "model.yaml").write_text("task: tensor\n")
        self.cluster_view = ClusterView([])
        self.assigned: dict[str, int] = {}  # revision by block
        self.leaders = [LeaderClient(LeaderSearch([self.address])) for _ in range(2)]
        self.control = ManagerConnection(self.leaders[0], GatewayMember("g", "tcp://there"), self.hear)
        self.blocks = self
        machine = Machine("w", "node", WorkerSettings())
        self.attachment = Attachment("w", self.leaders[1], machine, Config(), self)
        self.tasks = BackgroundTasks("test")
        self.tasks.supervise("attachment", self.attachment.attach_to_leader, deadline_s=None)

    async def close(self) -> None:
        await self.tasks.close()
        await self.control.close()
        for leader in self.leaders:
            await leader.close()

    def held_blocks(self) -> list[tuple[str, HeldBlock]]:
        found = []
        for block_id, revision in self.assigned.items():
            held = HeldBlock(BlockAssignment(block_id, "m", "1", "", revision), BlockState.READY)
            held.is_resident = True
            found.append((block_id, held))
        return found

    def statistics(self) -> list[BlockStatistics]:
        return []

    def count_work(self) -> WorkCounts:
        return WorkCounts(0, 0, 0, 0)

    def list_gpu_memory(self) -> list[BlockGpuMemory]:
        return []

    async def wait_until_announced(self) -> None: ...

    def meet_gateways(self, endpoints: Iterable[str]) -> None: ...

    def access_changed(self, access: AccessView) -> None: ...

    def open_direct_endpoint(self) -> None: ...

    def on_removed(self) -> None: ...

    def assign(self, blocks: Sequence[BlockAssignment]) -> None:
        self.assigned = {each.block_id: each.revision for each in blocks}
        self.attachment.report()

    def on_name_taken(self, error: Exception) -> None:
        raise AssertionError(error)

    def hear(self, cluster_view: ClusterView) -> None:
        self.cluster_view = cluster_view

    @asynccontextmanager
    async def managing(self) -> AsyncIterator[Manager]:
        self.store = store = await SqliteMetadataStore.open(self.file)
        manager = make_manager(store, self.repository, rules=QUICK)
        await manager.start()
        server = await serve_manager(manager, self.address)
        yield manager
        await server.stop(None)
        await manager.close()
        await store.close()

    async def agree(self, manager: Manager, routing: str = "") -> None:
        """Wait until worker and gateway know the manager's desired state."""
        wanted = {block.block_id: block.revision for block in manager.control.desired.blocks.values()}
        await until(lambda: self.assigned == wanted)
        await until(
            lambda: {(view.block_id, view.routing) for view in self.cluster_view.blocks} == {(*wanted, routing)}
        )
        assert self.cluster_view.membership == manager.control.desired.membership


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    found = Bed(tmp_path)
    yield found
    await found.close()


async def test_live_workers_and_gateways_follow_a_wiped_store(bed: Bed) -> None:
    async with bed.managing() as manager:
        for routing in (HASHED, "") * 5:
            await manager.deployer.set_routing("m", routing)
        await bed.agree(manager)
        before, epoch, history = dict(bed.assigned), manager.control.epoch, manager.control.desired.history
    bed.file.unlink()
    async with bed.managing() as manager:
        await bed.agree(manager)
        assert bed.assigned.keys() != before.keys()
        assert manager.control.desired.history != history
        assert manager.control.epoch <= epoch, "the store's revision must have gone back"
        await manager.load("m")
        await bed.agree(manager)


async def test_live_workers_and_gateways_follow_a_restored_store(bed: Bed, tmp_path: Path) -> None:
    async with bed.managing() as manager:
        await bed.agree(manager)
    shutil.copy(bed.file, tmp_path / "copy.db")
    async with bed.managing() as manager:
        for _ in range(3):
            await manager.load("m")
        await manager.deployer.set_routing("m", HASHED)
        await bed.agree(manager, HASHED)
        before, epoch, history = dict(bed.assigned), manager.control.epoch, manager.control.desired.history
    async with bed.managing() as manager:  # a new leader of the same history
        await bed.agree(manager, HASHED)
        assert manager.control.desired.history == history
    shutil.copy(tmp_path / "copy.db", bed.file)
    async with bed.managing() as manager:
        await bed.agree(manager)
        assert bed.assigned.keys() == before.keys()
        assert max(bed.assigned.values()) < max(before.values())
        assert manager.control.epoch <= epoch, "the store's revision must have gone back"
        await manager.load("m")
        await bed.agree(manager)


async def test_a_deposed_leader_starts_no_history(bed: Bed) -> None:
    async with bed.managing() as manager:
        history = manager.control.desired.history
        assert history
        await manager.control.check_peer_epoch(history, manager.control.epoch)
        await manager.control.check_peer_epoch("another", manager.control.epoch + 9)
        assert manager.control.desired.history == history
        epoch = manager.control.epoch
        await bed.store.put("leader", b"another's")
        with suppress(NotLeader):  # the former leader may know that it lost its term, and then does not even try
            await manager.control.check_peer_epoch(history, epoch + 9)
        stored = await bed.store.get("history")
        assert stored is not None
        assert stored.value.decode() == history
