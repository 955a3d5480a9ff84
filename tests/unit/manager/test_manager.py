"""The manager with a real repository and a real metadata store: desired state is stored, and one manager leads."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockState, BlockView
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.core.errors import ConfigError, Conflict, InvalidRequest, NotLeader, UnknownModel
from penstock.core.settings import Routing
from penstock.manager.deployed_block import WorkerState
from penstock.manager.deploying.folder_changes import STEADY_S
from penstock.manager.manager import Manager
from penstock.manager.publishing.publisher import AssignedBlock
from penstock.manager.term import BlocksReport, EventDraft, WorkerFacts
from penstock.manager.worker_liveness import WorkerArrived, WorkerReported
from penstock.storage.metadata.metadata_store import Compare, MetadataStore, Write
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from tests.managers import list_block_views, make_manager

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
    manager = make_manager(store, repository, is_fresh=is_fresh)
    await manager.start()
    yield manager
    await manager.close()


def routings(views: Sequence[BlockView]) -> dict[str, str]:
    return {view.model: view.routing for view in views}


async def test_routing_is_published_and_removed(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        view = manager.control.term.publisher.view
        for routing in (HASHED, ""):
            seen = view.revision
            await manager.deployer.set_routing("a", routing)
            assert routings(list_block_views(manager)) == {"a": routing, "b": ""}
            assert len(view.read_since(seen).changed) == 1, "the change is published once"


async def test_routing_survives_the_manager(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        await manager.deployer.set_routing("b", HASHED)
    async with managing(repository, store) as manager:
        assert routings(list_block_views(manager)) == {"a": "", "b": HASHED}
        await manager.deployer.set_routing("b", "")
    async with managing(repository, store) as manager:
        assert routings(list_block_views(manager)) == {"a": "", "b": ""}


async def test_invalid_routing_changes_nothing(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        with pytest.raises(UnknownModel, match="no model 'nobody'"):
            await manager.deployer.set_routing("nobody", HASHED)
        for wrong in ('{"policy": "nonsense"}', '{"polici": "hash"}', "no JSON"):
            with pytest.raises(InvalidRequest, match=r"docs/routing\.md"):
                await manager.deployer.set_routing("a", wrong)
        assert (await store.list("routing/")).records == ()
        assert routings(list_block_views(manager)) == {"a": "", "b": ""}


async def test_an_unreadable_stored_routing_is_ignored(repository: Path, store: MetadataStore) -> None:
    await store.put("routing/a", b'{"policy": "of a later version"}')
    async with managing(repository, store) as manager:
        assert routings(list_block_views(manager)) == {"a": "", "b": ""}


# --- desired state is stored


def worker_holds(manager: Manager, worker: str, stream: int = 1) -> None:
    """Attach a worker and report all its assigned blocks as loaded."""
    term = manager.control.term
    term.worker_joined(WorkerArrived(worker, "1-life", stream), WorkerFacts(), BlocksReport([]), 0.0)
    report(manager, worker, stream)


def report(manager: Manager, worker: str, stream: int = 1) -> None:
    states = {
        each.block_id: WorkerState(BlockState.READY, "", each.revision, is_serving=True)
        for each in manager.control.term.publisher.get_assignment(worker).get_items().values()
        if isinstance(each, AssignedBlock)
    }
    manager.control.term.worker_reported(WorkerReported(worker, stream), BlocksReport(states.items()), None, 0.0)


async def serve_as(manager: Manager, worker: str) -> None:
    """Act as a worker that carries out every assignment, until cancelled."""
    while True:
        report(manager, worker)
        await manager.control.notify()
        await asyncio.sleep(0.01)


def states(manager: Manager) -> dict[str, BlockState]:
    return {view.model: view.state for view in list_block_views(manager)}


async def test_blocks_keep_their_ids_and_revisions_after_restarts(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        before = {view.model: view.block_id for view in list_block_views(manager)}
        revisions = {block_id: block.revision for block_id, block in manager.control.desired.blocks.items()}
    async with managing(repository, store) as manager:
        assert {view.model: view.block_id for view in list_block_views(manager)} == before
        assert {block_id: block.revision for block_id, block in manager.control.desired.blocks.items()} == revisions


async def test_loading_a_model_raises_only_its_own_revision(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        before = {block.record.model: block.revision for block in manager.control.desired.blocks.values()}
        worker_holds(manager, "w")
        working = asyncio.create_task(serve_as(manager, "w"))
        await manager.load("a")
        working.cancel()
        after = {block.record.model: block.revision for block in manager.control.desired.blocks.values()}
        assert after["a"] > before["a"]
        assert after["b"] == before["b"]


async def test_an_unloaded_model_stays_unloaded_after_restarts_until_it_is_loaded(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as manager:
        worker_holds(manager, "w")
        working = asyncio.create_task(serve_as(manager, "w"))
        await manager.deployer.unload("a")
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


async def test_a_model_without_its_folder_is_removed(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        assert states(manager).keys() == {"a", "b"}
    shutil.rmtree(repository / "a")
    async with managing(repository, store) as manager:
        assert states(manager).keys() == {"b"}
        assert [block.record.model for block in manager.control.desired.blocks.values()] == ["b"]


async def test_a_faulty_model_is_deployed_so_that_workers_report_it_as_failed(
    repository: Path, store: MetadataStore
) -> None:
    (repository / "a" / "model.yaml").write_text("tusk: tensor\n")
    (repository / "a" / "4").mkdir()
    async with managing(repository, store) as manager:
        assert deployed_versions(manager) == {("a", "4"), ("b", "1")}
        (repository / "a" / "model.yaml").write_text("task: tensor\n")
    async with managing(repository, store) as manager:
        assert {
            block.version for block in manager.control.term.blocks.list_assigned_blocks() if block.model == "a"
        } == {"1"}


async def test_listed_versions_that_are_missing_fail_alone(repository: Path, store: MetadataStore) -> None:
    (repository / "a" / "model.yaml").write_text("versions: [1, 3]\n")
    async with managing(repository, store) as manager:
        assert deployed_versions(manager) == {("a", "1"), ("a", "3"), ("b", "1")}


async def test_a_repository_without_any_valid_model_prevents_the_start_unless_it_is_watched(
    repository: Path, store: MetadataStore
) -> None:
    (repository / "a" / "model.yaml").write_text("tusk: tensor\ninstances: two\n")
    (repository / "b" / "model.yaml").write_text("task: tensr\n")
    manager = make_manager(store, repository)
    with pytest.raises(ConfigError) as refused:
        await manager.start()
    for problem in ("unknown key 'tusk'", "model.yaml:2: instances", "unknown task 'tensr'"):
        assert problem in refused.value.message
    await manager.close()
    watching = make_manager(store, repository, is_watching=True)
    await watching.start()
    assert deployed_versions(watching) == {("a", "1"), ("b", "1")}
    await watching.close()


async def test_changed_folders_of_a_watched_repository_are_deployed(repository: Path, store: MetadataStore) -> None:
    manager = make_manager(store, repository, is_watching=True)
    await manager.start()

    async def look(now: float) -> None:
        await manager.deployer.deploy_changes(lambda model: model == "ruled", may_remove=True, now=now)

    def revisions() -> dict[str, int]:
        return {
            f"{block.model}:{block.version}": block.revision
            for block in manager.control.term.blocks.list_blocks()
            if block.is_wanted
        }

    before = revisions()
    for name in ("c", "ruled"):
        shutil.copytree(repository / "a", repository / name)
    shutil.copytree(repository / "b" / "1", repository / "b" / "2")
    (repository / "b" / "model.yaml").write_text("versions: all\n")
    await look(1000.0)
    assert revisions() == before, "the folders may still be incomplete"
    await look(1000.0 + STEADY_S)
    after = revisions()
    assert after.keys() == {"a:1", "b:1", "b:2", "c:1"}
    assert after["a:1"] == before["a:1"]

    shutil.copytree(repository / "b" / "1", repository / "b" / "3")
    shutil.rmtree(repository / "c")
    await manager.deployer.unload("a")
    (repository / "a" / "1" / "model.onnx").write_bytes(b"other")
    await look(2000.0)
    await look(2000.0 + STEADY_S)
    last = revisions()
    assert last.keys() == {"b:1", "b:2", "b:3"}, "an unloaded model stays unloaded"
    assert (last["b:1"], last["b:2"]) == (after["b:1"], after["b:2"]), "unchanged versions are not loaded again"
    await manager.close()


def deployed_versions(manager: Manager) -> set[tuple[str, str]]:
    return {(block.model, block.version) for block in manager.control.term.blocks.list_assigned_blocks()}


async def test_a_serving_version_is_not_reloaded_while_another_is_loaded(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as manager:
        worker_holds(manager, "w")
        (before,) = manager.control.desired.list_model_blocks("a")
        (repository / "a" / "2").mkdir()
        (repository / "a" / "2" / "model.onnx").write_bytes(b"never read here")
        loading = asyncio.create_task(manager.load("a"))
        await manager.control.wait_until(lambda: len(manager.control.desired.list_model_blocks("a")) == 2)
        old, new = sorted(manager.control.desired.list_model_blocks("a"), key=lambda block: block.revision)
        assert (old.block_id, old.revision) == (before.block_id, before.revision)
        assert new.record.version == "2"
        working = asyncio.create_task(serve_as(manager, "w"))
        await loading
        working.cancel()


async def test_events_are_stored_and_limited(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        manager.control.events.emit("test", "me", "first")
        await manager.control.wait_until(lambda: bool(manager.control.events.read(kind="test")))
    async with managing(repository, store) as manager:
        ((number, event),) = manager.control.events.read(kind="test")
        assert (event.subject, event.text) == ("me", "first")
        assert manager.control.events.read(after=number, kind="test") == []


async def test_an_acknowledged_write_has_its_event_even_if_the_manager_dies(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as manager:
        told = [EventDraft("test", "me", str(number)) for number in range(3)]
        before = await store.list("events/")
        await asyncio.gather(
            *(manager.control.events.commit([Write(f"new/{each.text}", b"1")], [each]) for each in told)
        )
        stored = {record.key: record.revision for record in (await store.list("")).records}
        found = manager.control.events.read(kind="test")
        assert [event.text for _, event in found] == ["0", "1", "2"]
        assert len({number for number, _ in found}) == 3
        for number, event in found:
            assert stored[f"events/{number:020}"] == stored[f"new/{event.text}"], "the event is part of the same change"
        with pytest.raises(Conflict):
            await manager.control.events.commit([Write("new/0", b"2")], told[:1], [Compare("new/0", 1)])
        assert len((await store.list("events/")).records) == len(before.records) + 3


async def test_a_follower_refuses_changes_and_names_the_leader(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as leader:
        me = ManagerRecord(manager_id="second", address="there:1")
        follower = make_manager(store, repository, me)
        await follower.start(is_sole=False)
        await until(lambda: follower.control.election.leader is not None)
        assert states(follower).keys() == {"a", "b"}, "a follower answers reads"
        for call in (follower.load("a"), follower.deployer.unload("a"), follower.deployer.set_routing("a", HASHED)):
            with pytest.raises(NotLeader, match="'manager' leads"):
                await call
        await leader.deployer.set_routing("a", HASHED)
        await follower.control.wait_until(lambda: routings(list_block_views(follower))["a"] == HASHED)
        for number in range(3):  # what this test loaded, together with the leader's updates
            leader.control.events.emit("test", f"l{number}", "")
            follower.control.events.emit("test", f"f{number}", "")
        await leader.control.wait_until(lambda: len(leader.control.events.read(kind="test")) == 6)
        assert {event.subject for _, event in leader.control.events.read(kind="test")} == {
            "l0",
            "l1",
            "l2",
            "f0",
            "f1",
            "f2",
        }
        assert (leader.control.epoch > 0, follower.control.epoch) == (True, 0)
        await leader.control.election.close()
        await follower.control.wait_until(lambda: follower.control.epoch > 0)
        await follower.deployer.set_routing("a", "")
        with pytest.raises(NotLeader):
            await leader.deployer.set_routing("a", HASHED)
        await follower.close()


async def test_blocks_of_an_earlier_version_of_penstock_keep_their_ids(repository: Path, store: MetadataStore) -> None:
    """The earlier version stored only the blocks' ids, so nobody has unloaded them."""
    await store.put("blocks/blk-old", b'{"model": "a", "version": "1"}')
    async with managing(repository, store) as manager:
        assert {view.model: view.state for view in list_block_views(manager)} == {
            "a": BlockState.LOADING,
            "b": BlockState.LOADING,
        }
        assert [view.block_id for view in list_block_views(manager) if view.model == "a"] == ["blk-old"]


async def test_a_version_must_be_a_number(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        for version in ("../b/1", "latest", "1/", "-1", "9" * 30):
            with pytest.raises(UnknownModel, match="versions are numbers"):
                await manager.deployer.choose("a", version)


async def test_a_model_from_another_managers_folder_stays(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as manager:
        assert states(manager).keys() == {"a", "b"}
    shutil.rmtree(repository / "a")
    successor = make_manager(store, repository)
    await successor.start(is_sole=False)
    await successor.control.wait_until(
        lambda: bool(successor.control.events.read(kind="leader")) and successor.control.epoch > 0
    )
    await successor.deployer.set_routing("b", HASHED)  # after its folders were read
    assert states(successor).keys() == {"a", "b"}
    await successor.close()


async def test_several_models_are_deployed_and_each_completely_or_not_at_all(
    repository: Path, store: MetadataStore
) -> None:
    for number in range(120):
        (repository / f"m{number}" / "1").mkdir(parents=True)
        (repository / f"m{number}" / "1" / "model.onnx").write_bytes(b"never read here")
        (repository / f"m{number}" / "model.yaml").write_text("task: tensor\n")
    async with managing(repository, store) as manager:
        assert len(list_block_views(manager)) == 122
        assert len({block.revision for block in manager.control.desired.blocks.values()}) == 3
