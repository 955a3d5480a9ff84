"""Rollouts performed by a manager: what is deployed, written, told to gateways, and kept over restarts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.blocks import BlockRole, BlockState
from penstock.core.cluster.answer_counts import AnswerCounts, bucket_of
from penstock.core.errors import ConfigError, InvalidRequest, UnknownModel
from penstock.core.routes import NameRoute
from penstock.manager.deployed_block import WorkerState
from penstock.manager.lives import WorkerArrived, WorkerHeard
from penstock.manager.manager import Manager
from penstock.manager.reign import Facts, Report
from penstock.manager.rollouts.plan import RolloutPhase
from penstock.manager.rollouts.runs import Rollouts
from penstock.manager.telling.boards import AssignedBlock
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.telemetry.metrics import RolloutMetrics


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
        return self.rollouts.all(name)[0].record.phase

    def route(self, name: str = "a") -> NameRoute | None:
        found = self.manager.reign.boards.view.get(f"route/{name}")
        assert found is None or isinstance(found, NameRoute)
        return found

    def shares(self, name: str = "a") -> dict[str, float]:
        """By version."""
        route = self.route(name)
        if route is None:
            return {}
        blocks = self.manager.desired.blocks
        return {blocks[each.block_id].record.version: each.weight for each in route.shares}

    def block_id(self, model: str, version: str) -> str:
        block = self.manager.desired.block(model, version)
        assert block is not None
        return block.block_id

    def state(self, model: str, version: str) -> BlockState:
        block = self.manager.reign.registry.get(self.block_id(model, version))
        assert block is not None
        return block.state()[0]

    async def count(self, new: int, errors: int = 0) -> None:
        record = self.rollouts.all("a")[0].record
        failed = {"engine_failed": errors} if errors else {}
        counts = []
        for is_control in (False, True):
            counts.append(AnswerCounts(record.old.block_id, 100, {}, {bucket_of(0.01): 100}, is_control=is_control))
            counts.append(AnswerCounts(record.new.block_id, new, failed, {bucket_of(0.01): new}, is_control=is_control))
        for listener in self.manager.on_counts:
            listener("g", counts)
        await self.manager.notify()

    async def count_until(self, phase: RolloutPhase) -> None:
        while self.phase() is not phase:
            await self.count(20)
            await asyncio.sleep(0.01)

    async def work(self) -> None:
        """A worker that does all that it is told."""
        reign = self.manager.reign
        reign.arrive(WorkerArrived("w", "1-life", 1), Facts(), Report([]), 0.0)
        while True:
            assigned = [
                each for each in reign.boards.assignment("w").items().values() if isinstance(each, AssignedBlock)
            ]
            states = {each.block_id: self._loaded(each) for each in assigned}
            reign.hear(WorkerHeard("w", 1), Report(states.items()), None, 0.0)
            await self.manager.notify()
            await asyncio.sleep(0.01)

    def _loaded(self, block: AssignedBlock) -> WorkerState:
        if block.version in self.failing:
            return WorkerState(BlockState.FAILED, "no network", block.revision)
        return WorkerState(BlockState.READY, "", block.revision, is_serving=True)

    def event_kinds(self) -> list[str]:
        return [event.kind for _, event in self.manager.events.read() if event.kind.startswith("rollout")]


@asynccontextmanager
async def managing(repository: Path, store: MetadataStore) -> AsyncIterator[Bed]:
    manager, registry = Manager(store, repository, is_fresh=True), CollectorRegistry()
    rollouts = Rollouts(manager, RolloutMetrics(registry))
    await manager.start()
    rollouts.start()
    bed = Bed(manager, rollouts, registry)
    working = asyncio.create_task(bed.work())
    await until(lambda: all(view.state is BlockState.READY for view in manager.view()))
    yield bed
    working.cancel()
    await rollouts.close()
    await manager.close()


async def test_a_new_version_is_deployed_beside_the_old_one_and_takes_over(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(10, 100), keep_s=0)
        assert bed.shares() == {"1": 100}, "while it is loaded"
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


async def test_a_bad_one_is_rolled_back_unloaded_and_stays_so_over_a_restart(
    repository: Path, store: MetadataStore
) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(50, 100))
        await until(lambda: bed.phase() is RolloutPhase.RUNNING)
        await bed.count(0, errors=20)
        assert bed.shares() == {"1": 100}, "at once"
        await until(lambda: bed.state("a", "2") is BlockState.UNLOADED)
        assert bed.state("a", "1") is BlockState.READY
    async with managing(repository, store) as bed:
        (rollout,) = bed.rollouts.all()
        assert (rollout.record.phase, rollout.answers) == (RolloutPhase.ROLLED_BACK, 20)
        assert "20 of its 20 requests failed" in rollout.record.reason
        assert bed.shares() == {"1": 100}
        assert bed.state("a", "1") is BlockState.READY
        await bed.manager.load("a")  # whoever loads the model wants its newest version
        assert bed.route() is None
        assert bed.state("a", "2") is BlockState.READY


async def test_one_that_does_not_load_fails_and_says_why(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        bed.failing.add("2")
        await bed.begin("a", "2")
        await until(lambda: bed.phase() is RolloutPhase.FAILED)
        assert "no network" in bed.rollouts.all("a")[0].record.reason
        assert bed.shares() == {"1": 100}
        assert bed.state("a", "1") is BlockState.READY


async def test_it_goes_on_with_another_manager(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(25, 50, 100))
        await until(lambda: bed.phase() is RolloutPhase.RUNNING)
        await bed.rollouts.pause("a")
    async with managing(repository, store) as bed:
        assert bed.shares() == {"1": 75, "2": 25}
        with pytest.raises(InvalidRequest, match="undo it, or let it end"):
            await bed.manager.load("a")
        await bed.rollouts.resume("a")
        await bed.count_until(RolloutPhase.DONE)
        await bed.rollouts.undo("a")
        assert bed.shares() == {"1": 100}
        await bed.rollouts.forget("a")
        assert bed.rollouts.all() == []
        assert bed.route() is None


async def test_one_whose_old_block_is_gone_is_undone_by_going_back(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(100,), min_answers=0, keep_s=0)
        await until(lambda: bed.state("a", "1") is BlockState.UNLOADED)
        await bed.rollouts.undo("a")
        await until(lambda: bed.phase() is RolloutPhase.DONE)
        assert bed.shares() == {"2": 0, "1": 100}
        assert bed.state("a", "1") is BlockState.READY


async def test_one_that_is_done_is_undone_after_a_restart_and_stays_so(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        add_version(repository, "a", 2)
        await bed.begin("a", "2", steps=(100,), min_answers=0)
        await until(lambda: bed.phase() is RolloutPhase.DONE)
    async with managing(repository, store) as bed:
        assert bed.state("a", "1") is not BlockState.UNLOADED, "the old block is kept"
        await bed.manager.change_block(bed.block_id("a", "1"), role=BlockRole.SPARE)
        await bed.rollouts.undo("a")
        await until(lambda: bed.phase() is RolloutPhase.DONE and bed.shares() == {"2": 0, "1": 100})
        plan = bed.rollouts.all("a")[0].record.plan.model_copy(update={"keep_s": 0.0})
        bed.rollouts.all("a")[0].record = bed.rollouts.all("a")[0].record.model_copy(update={"plan": plan})
        await until(lambda: bed.state("a", "2") is BlockState.UNLOADED)
    async with managing(repository, store) as bed:
        await until(lambda: bed.state("a", "1") is BlockState.READY)
        assert bed.state("a", "2") is BlockState.UNLOADED, "the newest in the folder, but it was undone"


async def test_two_models_share_a_name(repository: Path, store: MetadataStore) -> None:
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
        assert bed.state("b", "1") is BlockState.READY, "it was there before"
        with pytest.raises(InvalidRequest, match="nothing to undo"):
            await bed.rollouts.undo("either")


@pytest.mark.parametrize(
    ("plan", "error", "why"),
    [
        ({"name": "a", "new": "1"}, InvalidRequest, "answers for 'a' already"),
        ({"name": "a", "new": "7"}, ConfigError, "there is no version 7"),
        ({"name": "nobody", "new": "2"}, UnknownModel, "nothing answers for 'nobody'"),
        ({"name": "a", "new": "nobody:1"}, UnknownModel, "no model 'nobody'"),
        ({"name": "a b", "new": "1"}, InvalidRequest, "is no name"),
        ({"name": "a", "new": "2", "steps": [3, 1]}, InvalidRequest, "must rise"),
        ({"name": "a", "new": "2", "step": 3}, InvalidRequest, "docs/rollouts.md"),
        ({"name": "a", "new": "b", "old": "nobody:3"}, UnknownModel, "is not deployed"),
    ],
)
async def test_what_cannot_be_meant_is_refused_and_changes_nothing(
    repository: Path, store: MetadataStore, plan: dict[str, object], error: type[Exception], why: str
) -> None:
    async with managing(repository, store) as bed:
        with pytest.raises(error, match=why):
            await bed.rollouts.begin(json.dumps(plan))
        assert bed.rollouts.all() == []
        assert (await store.list("rollouts/")).records == ()
        with pytest.raises(InvalidRequest, match="there is no rollout of 'a'"):
            await bed.rollouts.pause("a")


async def test_a_second_one_of_a_name_waits_for_the_first(repository: Path, store: MetadataStore) -> None:
    async with managing(repository, store) as bed:
        await bed.begin("a", "b")
        with pytest.raises(InvalidRequest, match="undo it first"):
            await bed.begin("a", "b")
        with pytest.raises(InvalidRequest, match="undo it first"):
            await bed.rollouts.forget("a")
