"""A store that was wiped, or set back to an older copy, while workers and gateways live: they begin anew with it."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockState, ClusterPicture, GatewayMember
from penstock.core.config import Config, WorkerSettings
from penstock.core.errors import NotLeader
from penstock.core.settings import Routing
from penstock.manager.lives import LifeRules
from penstock.manager.manager import Manager
from penstock.manager.server import serve_manager
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.asking import AskedManagers
from penstock.wire.control import RemoteControl
from penstock.wire.leader import Leader
from penstock.worker.attachment import Attachment, AttachmentOwner
from penstock.worker.machine import Machine
from penstock.worker.residency.blocks import WorkInHand
from penstock.worker.residency.residency import HeldBlock
from penstock.worker.residency.steps import Assigned

QUICK = LifeRules(offline_s=0.5)  # what a manager waits for those whom an earlier one told something
HASHED = Routing(policy="hash", key="user").model_dump_json()


class Bed:
    """A worker and a gateway, which live on while their manager is another."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "metadata.db"
        self.address = f"unix:{folder / 'manager.sock'}"
        self.repository = folder / "models"
        (self.repository / "m" / "1").mkdir(parents=True)
        (self.repository / "m" / "1" / "model.onnx").write_bytes(b"never read here")
        (self.repository / "m" / "model.yaml").write_text("task: tensor\n")
        self.picture = ClusterPicture([])
        self.assigned: dict[str, int] = {}  # by block, its revision
        self.leaders = [Leader(AskedManagers([self.address])) for _ in range(2)]
        self.control = RemoteControl(self.leaders[0], GatewayMember("g", "tcp://there"), self.hear)
        owner = AttachmentOwner(
            self.held,
            self.be_heard,
            self.assign,
            lambda endpoints: None,
            list,
            lambda: WorkInHand(0, 0, 0, 0),
            list,
            self.refused,
            lambda: None,
            lambda access: None,
            lambda: None,
        )
        machine = Machine("w", "node", WorkerSettings())
        self.attachment = Attachment("w", self.leaders[1], machine, Config(), owner)
        self.attending = asyncio.create_task(self.attachment.attend_forever())

    async def close(self) -> None:
        self.attending.cancel()
        await asyncio.gather(self.attending, return_exceptions=True)
        await self.control.close()
        for leader in self.leaders:
            await leader.close()

    def held(self) -> list[tuple[str, HeldBlock]]:
        found = []
        for block_id, revision in self.assigned.items():
            held = HeldBlock(Assigned(block_id, "m", "1", "", revision), BlockState.READY)
            held.is_resident = True
            found.append((block_id, held))
        return found

    async def be_heard(self) -> None:
        """There are no gateways to tell."""

    def assign(self, blocks: Sequence[Assigned]) -> None:
        self.assigned = {each.block_id: each.revision for each in blocks}
        self.attachment.report()

    def refused(self, error: Exception) -> None:
        raise AssertionError(error)

    def hear(self, picture: ClusterPicture) -> None:
        self.picture = picture

    @asynccontextmanager
    async def managing(self) -> AsyncIterator[Manager]:
        self.store = store = await SqliteMetadataStore.open(self.file)
        manager = Manager(store, self.repository, rules=QUICK)
        await manager.start()
        server = await serve_manager(manager, self.address)
        yield manager
        await server.stop(None)
        await manager.close()
        await store.close()

    async def agree(self, manager: Manager, routing: str = "") -> None:
        """Worker and gateway know what the manager wants."""
        wanted = {block.block_id: block.revision for block in manager.desired.blocks.values()}
        await until(lambda: self.assigned == wanted)
        await until(lambda: {(view.block_id, view.routing) for view in self.picture.blocks} == {(*wanted, routing)})
        assert self.picture.membership == manager.desired.membership


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    found = Bed(tmp_path)
    yield found
    await found.close()


async def test_a_wiped_store_is_followed_by_those_who_live(bed: Bed) -> None:
    async with bed.managing() as manager:
        for routing in (HASHED, "") * 5:
            await manager.set_routing("m", routing)
        await bed.agree(manager)
        before, epoch, history = dict(bed.assigned), manager.epoch, manager.desired.history
    bed.file.unlink()
    async with bed.managing() as manager:
        await bed.agree(manager)
        assert bed.assigned.keys() != before.keys()
        assert manager.desired.history != history
        assert manager.epoch <= epoch, "or the test shows nothing"
        await manager.load("m")
        await bed.agree(manager)


async def test_a_store_that_was_set_back_is_followed_by_those_who_live(bed: Bed, tmp_path: Path) -> None:
    async with bed.managing() as manager:
        await bed.agree(manager)
    shutil.copy(bed.file, tmp_path / "copy.db")
    async with bed.managing() as manager:
        for _ in range(3):
            await manager.load("m")
        await manager.set_routing("m", HASHED)
        await bed.agree(manager, HASHED)
        before, epoch, history = dict(bed.assigned), manager.epoch, manager.desired.history
    async with bed.managing() as manager:  # a successor of the same history
        await bed.agree(manager, HASHED)
        assert manager.desired.history == history
    shutil.copy(tmp_path / "copy.db", bed.file)
    async with bed.managing() as manager:
        await bed.agree(manager)
        assert bed.assigned.keys() == before.keys()
        assert max(bed.assigned.values()) < max(before.values())
        assert manager.epoch <= epoch, "or the test shows nothing"
        await manager.load("m")
        await bed.agree(manager)


async def test_who_was_deposed_begins_no_history(bed: Bed) -> None:
    async with bed.managing() as manager:
        history = manager.desired.history
        assert history
        await manager.prove_reign(history, manager.epoch)
        await manager.prove_reign("another", manager.epoch + 9)
        assert manager.desired.history == history
        epoch = manager.epoch
        await bed.store.put("leader", b"another's")
        with suppress(NotLeader):  # it may know by now that it leads no more, and then it does not even try
            await manager.prove_reign(history, epoch + 9)
        stored = await bed.store.get("history")
        assert stored is not None
        assert stored.value.decode() == history
