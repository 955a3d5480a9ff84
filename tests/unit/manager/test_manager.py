"""The manager over a real repository and a real metadata store: what is wanted is kept, and one manager leads."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockState, BlockView
from penstock.core.cluster.leaders import ManagerRecord
from penstock.core.errors import ConfigError, Conflict, InvalidRequest, NotLeader, UnknownModel
from penstock.core.settings import Routing
from penstock.manager.deployed_block import WorkerState
from penstock.manager.lives import WorkerArrived, WorkerHeard
from penstock.manager.manager import Manager
from penstock.manager.reign import Facts, Notice, Report
from penstock.manager.telling.boards import AssignedBlock
from penstock.storage.metadata.base import Compare, MetadataStore, Write
from penstock.storage.metadata.sqlite import SqliteMetadataStore

HASHED = Routing(policy="hash", key="user").model_dump_json()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "1" / "model.onnx").write_bytes(b"never read here")
        (tmp_path / "models" / name / "model.yaml").write_text("task: tensor\n")
    return tmp_path / "models"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[MetadataStore]:
    opened = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    yield opened
    await opened.close()


@asynccontextmanager
async def managing(repository: Path, store: MetadataStore, is_fresh: bool = True) -> AsyncIterator[Manager]:
    manager = Manager(store, repository, is_fresh=is_fresh)
    await manager.start()
    yield manager
    await manager.close()


def routings(views: Sequence[BlockView]) -> dict[str, str]:
    return {view.model: view.routing for view in views}


async def test_routing_is_seen_and_goes_again(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        view = manager.reign.boards.view
        for routing in (HASHED, ""):
            seen = view.revision
            await manager.set_routing("a", routing)
            assert routings(manager.view()) == {"a": routing, "b": ""}
            assert len(view.since(seen).changed) == 1, "one change is told"


async def test_routing_outlives_the_manager(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        await manager.set_routing("b", HASHED)
    async with managing(repository, store) as manager:
        assert routings(manager.view()) == {"a": "", "b": HASHED}
        await manager.set_routing("b", "")
    async with managing(repository, store) as manager:
        assert routings(manager.view()) == {"a": "", "b": ""}


async def test_what_is_wrong_changes_nothing(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        with pytest.raises(UnknownModel, match="no model 'nobody'"):
            await manager.set_routing("nobody", HASHED)
        for wrong in ('{"policy": "nonsense"}', '{"polici": "hash"}', "no JSON"):
            with pytest.raises(InvalidRequest, match=r"docs/routing\.md"):
                await manager.set_routing("a", wrong)
        assert (await store.list("routing/")).records == ()
        assert routings(manager.view()) == {"a": "", "b": ""}


async def test_a_stored_routing_that_is_not_understood_is_passed_over(repository: Path, store: MetadataStore) -> None:
    await store.put("routing/a", b'{"policy": "of a later version"}')
    async with managing(repository, store) as manager:
        assert routings(manager.view()) == {"a": "", "b": ""}


# --- what is wanted is kept


def worker_holds(manager: Manager, worker: str, stream: int = 1) -> None:
    """It attaches with all that is assigned, loaded."""
    reign = manager.reign
    reign.arrive(WorkerArrived(worker, "1-life", stream), Facts(), Report([]), 0.0)
    report(manager, worker, stream)


def report(manager: Manager, worker: str, stream: int = 1) -> None:
    states = {
        each.block_id: WorkerState(BlockState.READY, "", each.revision, is_serving=True)
        for each in manager.reign.boards.assignment(worker).items().values()
        if isinstance(each, AssignedBlock)
    }
    manager.reign.hear(WorkerHeard(worker, stream), Report(states.items()), None, 0.0)


async def serve_as(manager: Manager, worker: str) -> None:
    """Does all that it is told, until cancelled."""
    while True:
        report(manager, worker)
        await manager.notify()
        await asyncio.sleep(0.01)


def states(manager: Manager) -> dict[str, BlockState]:
    return {view.model: view.state for view in manager.view()}


async def test_blocks_keep_their_ids_and_revisions_over_restarts(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        before = {view.model: view.block_id for view in manager.view()}
        revisions = {block_id: block.revision for block_id, block in manager.desired.blocks.items()}
    async with managing(repository, store) as manager:
        assert {view.model: view.block_id for view in manager.view()} == before
        assert {block_id: block.revision for block_id, block in manager.desired.blocks.items()} == revisions


async def test_a_load_raises_the_revision_of_its_model_alone(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        before = {block.record.model: block.revision for block in manager.desired.blocks.values()}
        worker_holds(manager, "w")
        working = asyncio.create_task(serve_as(manager, "w"))
        await manager.load("a")
        working.cancel()
        after = {block.record.model: block.revision for block in manager.desired.blocks.values()}
        assert after["a"] > before["a"]
        assert after["b"] == before["b"]


async def test_what_was_unloaded_stays_so_over_restarts_until_it_is_loaded(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as manager:
        worker_holds(manager, "w")
        working = asyncio.create_task(serve_as(manager, "w"))
        await manager.unload("a")
        working.cancel()
        assert states(manager) == {"a": BlockState.UNLOADED, "b": BlockState.READY}
    async with managing(repository, store) as manager:
        assert states(manager) == {"a": BlockState.UNLOADED, "b": BlockState.LOADING}
        worker_holds(manager, "w")
        working = asyncio.create_task(serve_as(manager, "w"))
        await manager.load("a")
        working.cancel()
    async with managing(repository, store) as manager:
        assert states(manager) == {"a": BlockState.LOADING, "b": BlockState.LOADING}


async def test_a_model_whose_folder_went_is_gone(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        assert states(manager).keys() == {"a", "b"}
    shutil.rmtree(repository / "a")
    async with managing(repository, store) as manager:
        assert states(manager).keys() == {"b"}
        assert [block.record.model for block in manager.desired.blocks.values()] == ["b"]


async def test_a_fault_in_a_model_refuses_the_start(repository: Path, store: MetadataStore) -> None:
    (repository / "a" / "model.yaml").write_text("tusk: tensor\n")
    manager = Manager(store, repository)
    with pytest.raises(ConfigError, match="tusk"):
        await manager.start()
    await manager.close()


async def test_what_served_is_not_reloaded_while_another_version_comes(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        worker_holds(manager, "w")
        (before,) = manager.desired.of_model("a")
        (repository / "a" / "2").mkdir()
        (repository / "a" / "2" / "model.onnx").write_bytes(b"never read here")
        loading = asyncio.create_task(manager.load("a"))
        await manager.wait_until(lambda: len(manager.desired.of_model("a")) == 2)
        old, new = sorted(manager.desired.of_model("a"), key=lambda block: block.revision)
        assert (old.block_id, old.revision) == (before.block_id, before.revision)
        assert new.record.version == "2"
        working = asyncio.create_task(serve_as(manager, "w"))
        await loading
        working.cancel()


async def test_events_are_kept_and_bounded(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        manager.events.tell("test", "me", "first")
        await manager.wait_until(lambda: bool(manager.events.read(kind="test")))
    async with managing(repository, store) as manager:
        ((number, event),) = manager.events.read(kind="test")
        assert (event.subject, event.text) == ("me", "first")
        assert manager.events.read(after=number, kind="test") == []


async def test_what_was_acknowledged_has_its_event_whoever_dies(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        told = [Notice("test", "me", str(number)) for number in range(3)]
        before = await store.list("events/")
        await asyncio.gather(*(manager.events.commit([Write(f"new/{each.text}", b"1")], [each]) for each in told))
        stored = {record.key: record.revision for record in (await store.list("")).records}
        found = manager.events.read(kind="test")
        assert [event.text for _, event in found] == ["0", "1", "2"]
        assert len({number for number, _ in found}) == 3
        for number, event in found:
            assert stored[f"events/{number:020}"] == stored[f"new/{event.text}"], "in the same change"
        with pytest.raises(Conflict):
            await manager.events.commit([Write("new/0", b"2")], told[:1], [Compare("new/0", 1)])
        assert len((await store.list("events/")).records) == len(before.records) + 3


async def test_who_does_not_lead_changes_nothing_and_says_who_does(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as leader:
        me = ManagerRecord(manager_id="second", address="there:1")
        follower = Manager(store, repository, me)
        await follower.start(is_sole=False)
        await until(lambda: follower.election.leader is not None)
        assert states(follower).keys() == {"a", "b"}, "it reads"
        for call in (follower.load("a"), follower.unload("a"), follower.set_routing("a", HASHED)):
            with pytest.raises(NotLeader, match="'manager' leads"):
                await call
        await leader.set_routing("a", HASHED)
        await follower.wait_until(lambda: routings(follower.view())["a"] == HASHED)
        for number in range(3):  # what was done here, at once with what the leader tells
            leader.events.tell("test", f"l{number}", "")
            follower.events.tell("test", f"f{number}", "")
        await leader.wait_until(lambda: len(leader.events.read(kind="test")) == 6)
        assert {event.subject for _, event in leader.events.read(kind="test")} == {"l0", "l1", "l2", "f0", "f1", "f2"}
        assert (leader.epoch > 0, follower.epoch) == (True, 0)
        await leader.election.close()
        await follower.wait_until(lambda: follower.epoch > 0)
        await follower.set_routing("a", "")
        with pytest.raises(NotLeader):
            await leader.set_routing("a", HASHED)
        await follower.close()


async def test_blocks_of_an_earlier_version_of_penstock_keep_their_ids(repository: Path, store: MetadataStore) -> None:
    """It kept nothing but who they are: nobody has unloaded them."""
    await store.put("blocks/blk-old", b'{"model": "a", "version": "1"}')
    async with managing(repository, store) as manager:
        assert {view.model: view.state for view in manager.view()} == {"a": BlockState.LOADING, "b": BlockState.LOADING}
        assert [view.block_id for view in manager.view() if view.model == "a"] == ["blk-old"]


async def test_a_version_is_a_number_and_no_path(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        for version in ("../b/1", "latest", "1/", "-1", "9" * 30):
            with pytest.raises(UnknownModel, match="versions are numbers"):
                await manager.choose("a", version)


async def test_what_only_another_manager_has_in_its_folder_stays(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        assert states(manager).keys() == {"a", "b"}
    shutil.rmtree(repository / "a")
    successor = Manager(store, repository)
    await successor.start(is_sole=False)
    await successor.wait_until(lambda: bool(successor.events.read(kind="leader")) and successor.epoch > 0)
    await successor.set_routing("b", HASHED)  # after what its folders say
    assert states(successor).keys() == {"a", "b"}
    await successor.close()


async def test_many_models_are_deployed_each_all_or_none(repository: Path, store: MetadataStore) -> None:
    for number in range(120):
        (repository / f"m{number}" / "1").mkdir(parents=True)
        (repository / f"m{number}" / "1" / "model.onnx").write_bytes(b"never read here")
        (repository / f"m{number}" / "model.yaml").write_text("task: tensor\n")
    async with managing(repository, store) as manager:
        assert len(manager.view()) == 122
        assert len({block.revision for block in manager.desired.blocks.values()}) == 3
