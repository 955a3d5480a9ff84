"""A worker's blocks with real models: loaded on demand, unloaded, and reloaded."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.waiting import until
from penstock.core.blocks import BlockState
from penstock.core.config import Config, TelemetrySettings, WorkerSettings
from penstock.core.errors import DeviceOutOfMemory, ModelNotReady, PenstockError
from penstock.core.tensors import Tensor, from_array, to_array
from penstock.features.registry.scan import scan
from penstock.features.registry.sources import ModelSources
from penstock.tasks.base import TaskRequest
from penstock.telemetry.gpus import Gpus
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.residency.residency_actions import BlockAssignment
from penstock.worker.residency.worker_blocks import Blocks, now
from penstock.worker.worker_job import WorkerJob
from tests.nvml import GIB, FakeGpu, FakeNvml
from tests.registry_bed import registry_bed
from tests.servers import write_factor

LAZY = "residence: {load: lazy}\n"
PADDING_BYTES = 64 * 1024 * 1024  # of a sparse file: it decides a model's size without using disk space
WAIT_S = 30.0


def write_again(repository: Path, name: str, factor: float, settings: str = "") -> None:
    (repository / name / "1" / "model.onnx").unlink()
    (repository / name / "1").rmdir()
    write_factor(repository, name, factor, settings)


def pad(repository: Path, name: str) -> None:
    with (repository / name / "1" / "padding.bin").open("wb") as file:
        file.truncate(PADDING_BYTES)


class Bed:
    """The blocks of one worker, ticking."""

    def __init__(
        self,
        repository: Path,
        budget_bytes: int = 0,
        manager: Callable[[], str] = str,
        gpus: Gpus | None = None,
    ) -> None:
        self.repository = repository
        self.handed_back: list[WorkerJob] = []
        self.answers: dict[int, list[Tensor] | PenstockError] = {}
        self.announced = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = iter(range(1_000_000))
        self._registry = CollectorRegistry()
        config = Config(worker=WorkerSettings(memory_budget_bytes=budget_bytes), data_dir=repository / "data")
        metrics, traces = WorkerMetrics(self._registry), Traces(TelemetrySettings(), "test")
        self.blocks = Blocks(config, metrics, traces, self, ModelSources(config, manager), gpus)
        self.spawn(self._tick_forever())

    def assign(self, *names: str, revision: int = 1) -> None:
        self.blocks.assign(
            [BlockAssignment(f"blk-{name}", name, "1", str(self.repository / name), revision) for name in names]
        )

    def state(self, name: str) -> BlockState:
        return dict(self.blocks.held_blocks())[f"blk-{name}"].state

    def offers(self) -> dict[str, tuple[bool, bool]]:
        """Map each name to whether it is dormant and whether it is described."""
        return {block.model: (is_dormant, block.is_described) for block, is_dormant in self.blocks.offers()}

    def send(self, name: str, value: float = 1.0) -> WorkerJob:
        request = TaskRequest([from_array("x", np.array([[value]], np.float32))], [])
        job = WorkerJob(next(self._ids), 1, request, now() + WAIT_S, self._answered)
        holder = self.blocks.holder(f"blk-{name}")
        assert holder is not None, f"{name} takes no jobs"
        holder.accept(job)
        return job

    async def ask(self, name: str, value: float = 1.0) -> float:
        return await self.answer(self.send(name, value))

    async def answer(self, job: WorkerJob) -> float:
        await until(lambda: job.job_id in self.answers, "it is answered")
        outcome = self.answers[job.job_id]
        if isinstance(outcome, PenstockError):
            raise outcome
        return float(to_array(outcome[0])[0, 0])

    def events(self, name: str) -> dict[str, float]:
        return {
            sample.labels["event"]: sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
            if sample.name == "penstock_loads_total" and sample.labels["model"] == name
        }

    async def close(self) -> None:
        self.blocks.leave()
        await self.blocks.drain()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.blocks.close()

    def announce(self) -> None:
        self.announced += 1

    def report(self) -> None: ...

    def hand_back(self, jobs: list[WorkerJob]) -> None:
        self.handed_back += jobs

    def _answered(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        assert job.job_id not in self.answers, "a job is answered once"
        self.answers[job.job_id] = outcome

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    async def _tick_forever(self) -> None:
        while True:
            self.blocks.tick()
            self.blocks.flush()
            await asyncio.sleep(0.01)


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    made = Bed(tmp_path)
    yield made
    await made.close()


async def test_the_first_job_loads_a_lazy_block(bed: Bed) -> None:
    write_factor(bed.repository, "m", 2.0, LAZY)
    bed.assign("m")
    await until(bed.offers, "it is offered")
    assert bed.offers() == {"m": (True, False)}
    assert bed.state("m") is BlockState.DORMANT
    assert await bed.ask("m", 5.0) == 10.0
    assert bed.offers() == {"m": (False, True)}
    assert bed.state("m") is BlockState.READY
    assert bed.events("m") == {"woken": 1, "loaded": 1}


@pytest.mark.parametrize("times", [1, 2])
async def test_an_open_engine_choice_is_made_once(bed: Bed, tmp_path: Path, times: int) -> None:
    write_factor(tmp_path, "m", 2.0, "engine: auto\n")
    for _ in range(times):
        bed.assign("m")
        await until(bed.offers, "it is offered")
        ((described, _),) = bed.blocks.offers()
        bed.assign()
        await until(lambda: not bed.offers(), "it is gone")
    assert described.note.startswith(("engine auto is onnx: ", "engine auto is openvino: "))
    assert described.note.endswith("(remembered)") == (times == 2)
    assert len(list((tmp_path / "data" / "engine-choices").iterdir())) == 1


async def test_simultaneous_jobs_load_a_block_once(bed: Bed) -> None:
    write_factor(bed.repository, "m", 2.0, LAZY)
    bed.assign("m")
    await until(bed.offers, "it is offered")
    jobs = [bed.send("m", float(number)) for number in range(30)]
    assert [await bed.answer(job) for job in jobs] == [2.0 * number for number in range(30)]
    assert bed.events("m") == {"woken": 1, "loaded": 1}


async def test_a_wake_loads_a_block_without_a_job(bed: Bed) -> None:
    write_factor(bed.repository, "m", 2.0, LAZY)
    bed.assign("m")
    await until(bed.offers, "it is offered")
    bed.blocks.wake("blk-m")
    await until(lambda: bed.offers()["m"] == (False, True), "it is loaded")
    bed.blocks.wake("blk-nobody")


async def test_an_idle_block_becomes_dormant_with_its_description_and_is_loaded_again(bed: Bed) -> None:
    write_factor(bed.repository, "m", 2.0, "residence: {load: lazy, idle_unload_s: 0.1}\n")
    bed.assign("m")
    await until(bed.offers, "it is offered")
    for number in range(3):
        assert await bed.ask("m", number) == 2.0 * number
        await until(lambda: bed.offers() == {"m": (True, True)}, "it rests, and is known")
    ((block, _),) = bed.blocks.offers()
    assert block.fingerprint
    assert [spec.name for spec in block.inputs] == ["x"]
    assert bed.events("m") == {"woken": 3, "loaded": 3, "idle": 3}
    (statistics,) = bed.blocks.statistics()
    assert statistics.success.count == 3, "the counts continue"


async def test_a_lazy_block_that_cannot_be_loaded_fails_its_jobs(bed: Bed) -> None:
    write_factor(bed.repository, "m", 2.0, LAZY)
    bed.assign("m")
    await until(bed.offers, "it is offered")
    (bed.repository / "m" / "1" / "model.onnx").write_bytes(b"no model")
    jobs = [bed.send("m"), bed.send("m")]
    for job in jobs:
        with pytest.raises(ModelNotReady, match="failed to load"):
            await bed.answer(job)
    assert bed.state("m") is BlockState.FAILED
    assert bed.offers() == {}
    assert bed.blocks.holder("blk-m") is None
    write_again(bed.repository, "m", 3.0, LAZY)
    bed.assign("m", revision=2)
    await until(bed.offers, "it is offered again")
    assert await bed.ask("m", 5.0) == 15.0


async def test_two_models_alternate_in_room_for_one(tmp_path: Path) -> None:
    for factor, name in enumerate(("a", "b"), start=2):
        write_factor(tmp_path, name, float(factor))
        pad(tmp_path, name)
    bed = Bed(tmp_path, budget_bytes=PADDING_BYTES * 3 // 2)
    bed.assign("a", "b")
    await until(lambda: bed.offers().keys() == {"a", "b"}, "both are offered")
    assert bed.offers() == {"a": (False, True), "b": (True, False)}, (
        "the first model was loaded in advance, the second was not"
    )
    for _ in range(3):
        assert await bed.ask("b", 5.0) == 15.0
        assert await bed.ask("a", 5.0) == 10.0
    assert bed.events("a") == {"loaded": 4, "woken": 3, "evicted": 3}
    assert bed.events("b") == {"loaded": 3, "woken": 3, "evicted": 3}
    await bed.close()


async def test_a_model_larger_than_the_budget_is_reported(tmp_path: Path) -> None:
    write_factor(tmp_path, "m", 2.0)
    pad(tmp_path, "m")
    bed = Bed(tmp_path, budget_bytes=PADDING_BYTES // 2)
    bed.assign("m")
    await until(lambda: bed.state("m") is BlockState.FAILED, "it failed")
    assert "worker.memory_budget_bytes" in dict(bed.blocks.held_blocks())["blk-m"].reason
    await bed.close()


async def test_requests_for_a_model_without_gpu_memory_get_its_size_and_the_free_memory(
    tmp_path: Path,
) -> None:
    bed = Bed(tmp_path, gpus=Gpus(FakeNvml(FakeGpu(8 * GIB, 7 * GIB))))
    residence = "{load: lazy, device_memory_bytes: 3221225472, max_waiting_s: 0.2}"
    write_factor(tmp_path, "m", 2.0)
    (tmp_path / "m" / "model.yaml").write_text(f"instances: {{device: cuda}}\nresidence: {residence}\n")
    bed.assign("m")
    await until(lambda: bed.state("m") is BlockState.DORMANT)
    with pytest.raises(DeviceOutOfMemory, match=r"it needs 3\.0 GiB on cuda:0, where 1\.0 GiB are free"):
        await bed.ask("m")
    await bed.close()


async def test_a_reload_swaps_under_load_and_a_failed_one_keeps_serving(bed: Bed) -> None:
    write_factor(bed.repository, "m", 2.0)
    bed.assign("m")
    await until(bed.offers, "it is loaded")
    file = bed.repository / "m" / "1" / "model.onnx"
    answers: set[float] = set()
    for revision in range(2, 8):
        if revision % 2:
            write_again(bed.repository, "m", float(revision))
        else:
            file.write_bytes(b"no model")
        bed.assign("m", revision=revision)
        while bed.state("m") is BlockState.LOADING:
            answers.add(await bed.ask("m", 1.0))
        assert bed.state("m") is (BlockState.READY if revision % 2 else BlockState.FAILED)
        assert await bed.ask("m", 1.0) == (revision if revision % 2 else max(2, revision - 1))
    assert answers <= {2.0, 3.0, 5.0, 7.0}
    assert bed.events("m") == {"loaded": 4, "failed": 3}
    (statistics,) = bed.blocks.statistics()
    assert statistics.success.count == len(bed.answers), "answers of the old revision are counted too"


async def test_waiting_jobs_are_handed_back_when_their_block_is_withdrawn_or_the_worker_leaves(bed: Bed) -> None:
    for name in ("a", "b"):
        write_factor(bed.repository, name, 2.0, LAZY)
    bed.assign("a", "b")
    await until(lambda: len(bed.offers()) == 2, "both are offered")
    first, second = bed.send("a"), bed.send("b")
    announced = bed.announced
    bed.assign("b")
    assert bed.handed_back == [first]
    assert bed.announced > announced
    bed.blocks.leave()
    assert bed.handed_back == [first, second]
    assert bed.blocks.holder("blk-b") is None
    assert bed.blocks.offers() == []


async def test_probes_are_answered_for_loaded_and_dormant_blocks(bed: Bed) -> None:
    write_factor(bed.repository, "lazy", 2.0, LAZY)
    write_factor(bed.repository, "eager", 2.0)
    bed.assign("lazy", "eager")
    await until(lambda: len(bed.offers()) == 2, "both are offered")
    told: dict[str, str] = {}
    for name in ("lazy", "eager", "nobody"):
        bed.blocks.probe(f"blk-{name}", partial(told.__setitem__, name))
    await until(lambda: len(told) == 3, "all have answered")
    assert told["lazy"] == told["eager"] == ""
    assert told["nobody"]
    assert bed.offers()["lazy"] == (True, False), "a probe does not load the model"


async def test_a_model_in_a_registry_is_fetched_once_it_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.features.registry.sources.GIVE_UP_S", 0.0)
    monkeypatch.setattr("penstock.worker.residency.worker_blocks.RETRY_S", 0.05)
    write_factor(tmp_path / "models", "double", 2.0)
    async with registry_bed(tmp_path / "registry") as registry:
        scanned = scan(tmp_path / "models" / "double", "")
        async with registry.client() as client:
            made = await client.push(scanned.manifest, scanned.files)
        address = ""
        bed = Bed(tmp_path / "worker", manager=lambda: address)
        bed.blocks.assign([BlockAssignment("blk-double", "double", "1", f"registry:{made.digest}", 1)])
        await until(lambda: bed.state("double") is BlockState.FAILED, "no manager is there")
        address = registry.address
        await until(lambda: bed.state("double") is BlockState.READY, "it is fetched", WAIT_S)
        assert await bed.ask("double", 4.0) == 8.0
        bed.blocks.assign([])
        await until(lambda: not dict(bed.blocks.held_blocks()), "it is let go of", WAIT_S)
        await bed.close()
