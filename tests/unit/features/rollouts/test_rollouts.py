"""Rollouts performed by a manager: deployed blocks, stored records, published routes, and restarts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.blocks import BlockRole, BlockState
from penstock.core.cluster.answer_counts import AnswerCounts, find_bucket
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import ConfigError, InvalidRequest, UnknownModel
from penstock.features.rollouts.rollout_plan import RolloutPhase
from penstock.features.rollouts.rollouts import Rollouts
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deployed_block import WorkerState
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.feature import TrafficReport
from penstock.manager.manager import Manager
from penstock.manager.publishing.publisher import AssignedBlock
from penstock.manager.term import BlocksReport, WorkerFacts
from penstock.manager.worker_liveness import WorkerArrived, WorkerReported
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.metrics import RolloutMetrics
from tests.managers import list_block_views


def add_version(repository: Path, model: str, version: int) -> None:
    (repository / model / str(version)).mkdir(parents=True)
    (repository / model / str(version) / "model.onnx").write_bytes(b"never read here")
    (repository / model / "model.yaml").write_text("task: tensor\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        add_version(tmp_path / "models", name, 1)
    return tmp_path / "models"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[MetadataStore]:
    opened = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    yield opened
    await opened.close()


class Bed:
    def __init__(self, manager: Manager, rollouts: Rollouts, registry: CollectorRegistry) -> None:
        self.manager = manager
        self.rollouts = rollouts
        self.registry = registry
        self.failing: set[str] = set()  # versions that do not load

    async def begin(self, name: str, new: str, **plan: object) -> None:
        given = {"name": name, "new": new, "hold_s": 0, "min_answers": 10, "keep_s": 3600, **plan}
        await self.rollouts.begin(json.dumps(given))

    def phase(self, name: str = "a") -> RolloutPhase:
        return self.rollouts.list_rollouts(name)[0].record.phase

    def route(self, name: str = "a") -> NameRoute | None:
        found = self.manager.control.term.publisher.view.get(f"route/{name}")
        assert found is None or isinstance(found, NameRoute)
        return found

    def shares(self, name: str = "a") -> dict[str, float]:
        """Return the shares by version."""
        route = self.route(name)
        if route is None:
            return {}
        blocks = self.manager.control.desired.blocks
        return {blocks[each.block_id].record.version: each.weight for each in route.shares}

    def block_id(self, model: str, version: str) -> str:
        block = self.manager.control.desired.find_block(model, version)
        assert block is not None
        return block.block_id

    def state(self, model: str, version: str) -> BlockState:
        block = self.manager.control.term.blocks.get(self.block_id(model, version))
        assert block is not None
        return block.compute_state()[0]

    async def count(self, new: int, errors: int = 0) -> None:
        record = self.rollouts.list_rollouts("a")[0].record
        failed = {"engine_failed": errors} if errors else {}
        counts = []
        for is_control in (False, True):
            counts.append(AnswerCounts(record.old.block_id, 100, {}, {find_bucket(0.01): 100}, is_control=is_control))
            counts.append(
                AnswerCounts(record.new.block_id, new, failed, {find_bucket(0.01): new}, is_control=is_control)
            )
        self.manager.report_traffic(TrafficReport("g", "1-life", counts))
        await self.manager.control.notify()

    async def count_until(self, phase: RolloutPhase) -> None:
        while self.phase() is not phase:
            await self.count(20)
            await asyncio.sleep(0.01)

    async def work(self) -> None:
        """Act as a worker that carries out every assignment."""
        term = self.manager.control.term
        term.worker_joined(WorkerArrived("w", "1-life", 1), WorkerFacts(), BlocksReport([]), 0.0)
        while True:
            assigned = [
                each
                for each in term.publisher.get_assignment("w").get_items().values()
                if isinstance(each, AssignedBlock)
            ]
            states = {each.block_id: self._loaded(each) for each in assigned}
            term.worker_reported(WorkerReported("w", 1), BlocksReport(states.items()), None, 0.0)
            await self.manager.control.notify()
            await asyncio.sleep(0.01)

    def _loaded(self, block: AssignedBlock) -> WorkerState:
        if block.version in self.failing:
            return WorkerState(BlockState.FAILED, "no network", block.revision)
        return WorkerState(BlockState.READY, "", block.revision, is_serving=True)

    def event_kinds(self) -> list[str]:
        return [event.kind for _, event in self.manager.control.events.read() if event.kind.startswith("rollout")]


@asynccontextmanager
async def managing(repository: Path, store: MetadataStore) -> AsyncIterator[Bed]:
    control, registry = ControlPlane(store), CollectorRegistry()
    deployer = Deployer(control, repository)
    rollouts = Rollouts(control, deployer, RolloutMetrics(registry))
    manager = Manager(control, deployer, [rollouts], is_fresh=True)
    await manager.start()
    bed = Bed(manager, rollouts, registry)
    working = asyncio.create_task(bed.work())
    await until(lambda: all(view.state is BlockState.READY for view in list_block_views(manager)))
    yield bed
    working.cancel()
    await manager.close()


async def test_a_new_version_is_deployed_beside_the_old_one_and_replaces_it(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(10, 100), keep_s=0)
        assert bed.shares() == {"1": 100}, "the new version is being loaded"
        await until(lambda: bed.shares() == {"1": 90, "2": 10})
        await bed.count_until(RolloutPhase.DONE)
        await until(lambda: bed.route() is None)
        await until(lambda: bed.state("a", "1") is BlockState.UNLOADED)
        assert bed.state("a", "2") is BlockState.READY
        await until(lambda: "rollout_done" in bed.event_kinds())
        assert bed.event_kinds()[:3] == ["rollout_started", "rollout_step", "rollout_step"]
        labels = {"name": "a", "kind": "step"}
        assert bed.registry.get_sample_value("penstock_rollout_changes_total", labels) == 2
        assert bed.registry.get_sample_value("penstock_rollout_weight", {"name": "a"}) == 100


async def test_a_bad_version_is_rolled_back_and_unloaded_and_stays_so_after_a_restart(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(50, 100))
        await until(lambda: bed.phase() is RolloutPhase.RUNNING)
        await bed.count(0, errors=20)
        assert bed.shares() == {"1": 100}, "traffic returns at once"
        await until(lambda: bed.state("a", "2") is BlockState.UNLOADED)
        assert bed.state("a", "1") is BlockState.READY
    async with managing(repository, store) as bed:
        (rollout,) = bed.rollouts.list_rollouts()
        assert (rollout.record.phase, rollout.answers) == (RolloutPhase.ROLLED_BACK, 20)
        assert "20 of 20 requests to the new block failed" in rollout.record.reason
        assert bed.shares() == {"1": 100}
        assert bed.state("a", "1") is BlockState.READY
        await bed.manager.load("a")  # a load request for the model means its newest version
        assert bed.route() is None
        assert bed.state("a", "2") is BlockState.READY


async def test_a_rollout_of_a_version_that_does_not_load_fails_with_the_reason(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        bed.failing.add("2")
        await bed.begin("a", "2")
        await until(lambda: bed.phase() is RolloutPhase.FAILED)
        assert "no network" in bed.rollouts.list_rollouts("a")[0].record.reason
        assert bed.shares() == {"1": 100}
        assert bed.state("a", "1") is BlockState.READY


async def test_a_rollout_continues_with_the_next_manager(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(25, 50, 100))
        await until(lambda: bed.phase() is RolloutPhase.RUNNING)
        await bed.rollouts.pause("a")
    async with managing(repository, store) as bed:
        assert bed.shares() == {"1": 75, "2": 25}
        with pytest.raises(InvalidRequest, match="undo it or wait for its end"):
            await bed.manager.load("a")
        await bed.rollouts.resume("a")
        await bed.count_until(RolloutPhase.DONE)
        await bed.rollouts.undo("a")
        assert bed.shares() == {"1": 100}
        await bed.rollouts.forget("a")
        assert bed.rollouts.list_rollouts() == []
        assert bed.route() is None


async def test_undoing_a_rollout_without_its_old_block_deploys_the_old_version_again(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(100,), min_answers=0, keep_s=0)
        await until(lambda: bed.state("a", "1") is BlockState.UNLOADED)
        await bed.rollouts.undo("a")
        await until(lambda: bed.phase() is RolloutPhase.DONE)
        assert bed.shares() == {"2": 0, "1": 100}
        assert bed.state("a", "1") is BlockState.READY


async def test_a_finished_rollout_can_be_undone_after_a_restart(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(100,), min_answers=0)
        await until(lambda: bed.phase() is RolloutPhase.DONE)
    async with managing(repository, store) as bed:
        assert bed.state("a", "1") is not BlockState.UNLOADED, "the old block is kept"
        await bed.manager.deployer.change_block(bed.block_id("a", "1"), role=BlockRole.SPARE)
        await bed.rollouts.undo("a")
        await until(lambda: bed.phase() is RolloutPhase.DONE and bed.shares() == {"2": 0, "1": 100})
        plan = bed.rollouts.list_rollouts("a")[0].record.plan.model_copy(update={"keep_s": 0.0})
        bed.rollouts.list_rollouts("a")[0].record = bed.rollouts.list_rollouts("a")[0].record.model_copy(
            update={"plan": plan}
        )
        await until(lambda: bed.state("a", "2") is BlockState.UNLOADED)
    async with managing(repository, store) as bed:
        await until(lambda: bed.state("a", "1") is BlockState.READY)
        assert bed.state("a", "2") is BlockState.UNLOADED, "the undone version is the newest one in the folder"


async def test_a_rollout_can_move_a_name_to_another_model(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        await bed.begin("either", "b", old="a", steps=(50,), min_answers=0, sticky="key", key="user")
        await until(lambda: bed.phase("either") is RolloutPhase.HOLDING)
        route = bed.route("either")
        assert route is not None
        assert [(each.block_id, each.weight) for each in route.shares] == [
            (bed.block_id("a", "1"), 50),
            (bed.block_id("b", "1"), 50),
        ]
        assert (route.sticky, route.key, route.trial) == ("key", "user", "")
        await bed.rollouts.undo("either")
        assert bed.state("b", "1") is BlockState.READY, "the block was deployed before"
        with pytest.raises(InvalidRequest, match="nothing to undo"):
            await bed.rollouts.undo("either")


@pytest.mark.parametrize(
    ("plan", "error", "why"),
    [
        ({"name": "a", "new": "1"}, InvalidRequest, "already serves 'a'"),
        ({"name": "a", "new": "7"}, ConfigError, "there is no version 7"),
        ({"name": "nobody", "new": "2"}, UnknownModel, "no deployed model is named 'nobody'"),
        ({"name": "a", "new": "nobody:1"}, UnknownModel, "no model 'nobody'"),
        ({"name": "a b", "new": "1"}, InvalidRequest, "invalid name"),
        ({"name": "a", "new": "2", "steps": [3, 1]}, InvalidRequest, "must increase"),
        ({"name": "a", "new": "2", "step": 3}, InvalidRequest, "docs/rollouts.md"),
        ({"name": "a", "new": "b", "old": "nobody:3"}, UnknownModel, "is not deployed"),
    ],
)
async def test_contradictory_plans_are_refused_and_change_nothing(
    repository: Path, store: MetadataStore, plan: dict[str, object], error: type[Exception], why: str
) -> None:
    async with managing(repository, store) as bed:
        with pytest.raises(error, match=why):
            await bed.rollouts.begin(json.dumps(plan))
        assert bed.rollouts.list_rollouts() == []
        assert (await store.list("rollouts/")).records == ()
        with pytest.raises(InvalidRequest, match="there is no rollout of 'a'"):
            await bed.rollouts.pause("a")


async def test_a_second_rollout_of_a_name_waits_for_the_first(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        await bed.begin("a", "b")
        with pytest.raises(InvalidRequest, match="undo it first"):
            await bed.begin("a", "b")
        with pytest.raises(InvalidRequest, match="undo it first"):
            await bed.rollouts.forget("a")
