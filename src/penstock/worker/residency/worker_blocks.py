"""Holds a worker's blocks: loads and unloads them as `residency.py` decides, and passes jobs to them."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog

from penstock.core.blocks import REGISTRY_SOURCE, BlockDescription
from penstock.core.config import Config
from penstock.core.errors import DeviceOutOfMemory, ModelNotReady, Unavailable, get_message
from penstock.core.statistics import BlockStatistics, merge_by_block
from penstock.engines.engine_protocols import EngineHome
from penstock.engines.torch.reserved import free_cached_memory
from penstock.models.engine_choice.chooser import EngineChooser
from penstock.models.loading import LoadedBlock, load_block, trim
from penstock.telemetry.control_groups import count_usable_cores
from penstock.telemetry.gpus import Gpus
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.offload.task_pool import TaskPool, TaskProcessUse
from penstock.worker.residency import residency_actions
from penstock.worker.residency.device_claims import DeviceClaims
from penstock.worker.residency.dormant import DormantBlock
from penstock.worker.residency.residency import HeldBlock, Residency
from penstock.worker.residency.residency_actions import Action, BlockAssignment, LoadReason
from penstock.worker.residency.resident import OpenedFiles, ResidentBlock, make_runner
from penstock.worker.residency.survey import survey
from penstock.worker.running.block_runner import WorkerTools
from penstock.worker.running.cores import Cores
from penstock.worker.running.preparation import PreparedMemory
from penstock.worker.worker_job import Holder, WorkerJob
from penstock.worker.worker_machine import BlockGpuMemory, find_siblings

log = structlog.get_logger()
now = time.monotonic
CLOSE_S = 6.0  # time for a stopping worker to close its models
CACHE_RELEASE_S = 1.0  # shortest time between two calls that make engines free cached GPU memory
RETRY_S = 15.0  # time until the next attempt to fetch a model
END_S = 0.1  # time for running jobs to finish when the worker closes its blocks


class WorkCounts(NamedTuple):
    jobs: int  # waiting and running
    waiting: int
    busy: int  # instances that run jobs
    instances: int


class BlocksOwner(Protocol):
    """The methods that `Blocks` calls on its worker."""

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run the coroutine as a task of the worker."""
        ...

    def announce(self) -> None:
        """Notify the gateways which blocks accept jobs now."""
        ...

    def report(self) -> None:
        """Notify the manager that the state of a block has changed."""
        ...

    def hand_back(self, jobs: list[WorkerJob]) -> None:
        """Return jobs that have not started to their gateways."""
        ...


class BlockSources(Protocol):
    """Provides the model files of blocks."""

    async def open(self, source: str) -> OpenedFiles:
        """Open the model files named by `source`; download the files if they are not on this machine."""
        ...


class Blocks:
    """Loads and unloads the blocks that a worker holds, and passes jobs to them."""

    def __init__(
        self,
        config: Config,
        metrics: WorkerMetrics,
        traces: Traces,
        owner: BlocksOwner,
        sources: BlockSources,
        gpus: Gpus | None = None,
    ) -> None:
        self._config = config
        self._sources = sources
        self._metrics = metrics
        self._owner = owner
        self._residency = Residency(config.worker.memory_budget_bytes, config.data_plane.drain_s)
        self._resident: dict[str, ResidentBlock] = {}
        self._ending: list[ResidentBlock] = []  # no longer offered, but some of their jobs still run
        self._dormant: dict[str, DormantBlock] = {}
        self._holders: dict[str, Holder] = {}  # the receivers of jobs, of resident and dormant blocks
        # Of blocks that are not in memory: the description when they were last loaded, or the one from their folder.
        self._descriptions: dict[str, BlockDescription] = {}
        self._earlier_totals: dict[str, BlockStatistics] = {}  # totals of earlier runners
        # Only for a single worker: several workers do not know of each other, and would choose the same cores.
        cores = Cores(find_siblings()) if config.workers == 1 else None
        self._tools = WorkerTools(PreparedMemory(config.limits.max_prepared_bytes), metrics, traces, cores)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._placement = TaskProcessUse(config.worker.compute_task_processes(config.workers, count_usable_cores()))
        self._gpus = gpus or Gpus()
        self._claims = DeviceClaims(self._gpus)
        self._next_cache_release = 0.0
        self._choose_engine = EngineChooser(config.data_dir, config.worker.engine_trial_s).choose
        self._is_leaving = False

    def __len__(self) -> int:
        """Return the number of jobs that wait or run."""
        return sum(len(each.runner) for each in self._resident.values()) + sum(map(len, self._dormant.values()))

    def holder(self, block_id: str) -> Holder | None:
        """Return the receiver of a block's jobs, or None if the worker rejects them, for example while it drains."""
        return self._holders.get(block_id)

    def offers(self) -> list[tuple[BlockDescription, bool]]:
        """Return the blocks that accept jobs, each with True if it is dormant (not loaded)."""
        if self._is_leaving:
            return []
        return [
            *((each.runner.description, False) for each in self._resident.values()),
            *((dormant.description, True) for dormant in self._dormant.values()),
        ]

    def held_blocks(self) -> Iterable[tuple[str, HeldBlock]]:
        return self._residency.held_blocks.items()

    def count_work(self) -> WorkCounts:
        runners = [each.runner for each in self._resident.values()]
        instances = sum(runner.description.instances for runner in runners)
        waiting = sum(runner.waiting for runner in runners) + sum(map(len, self._dormant.values()))
        return WorkCounts(len(self), waiting, instances - sum(runner.idle for runner in runners), instances)

    def list_gpu_memory(self) -> list[BlockGpuMemory]:
        return [
            BlockGpuMemory(block_id, each.runner.description.device, each.device_bytes)
            for block_id, each in self._resident.items()
            if each.runner.description.device != "cpu"
        ]

    def names(self) -> dict[str, tuple[str, str]]:
        described = {block_id: each.runner.description for block_id, each in self._resident.items()}
        return {block_id: (block.model, block.version) for block_id, block in described.items()}

    def statistics(self) -> list[BlockStatistics]:
        living = (each.runner.statistics for each in (*self._resident.values(), *self._ending))
        return merge_by_block((*self._earlier_totals.values(), *living))

    # --- events

    def assign(self, blocks: Sequence[BlockAssignment]) -> None:
        self._perform_actions(self._residency.assign(blocks, self._update_residency()))
        self._owner.report()

    def wake(self, block_id: str) -> None:
        self._perform_actions(self._residency.demand(block_id, self._update_residency()))

    def probe(self, block_id: str, done: Callable[[str], None]) -> None:
        """Check the block, and call `done` with the problem or an empty text.

        A dormant block is not loaded for the check.
        """
        resident = self._resident.get(block_id)
        if resident is not None:
            resident.runner.probe(done)
        else:
            done("" if block_id in self._dormant else "this worker does not hold the block")

    def tick(self) -> None:
        """Fail jobs that waited too long for a load, and load or unload blocks that are due."""
        at = self._update_residency()
        for block_id, dormant in self._dormant.items():
            kind = DeviceOutOfMemory if self._residency.lacks_device(block_id) else ModelNotReady
            dormant.expire(at, self._residency.waiting_reason(block_id), kind)
        self._free_cached_memory(at)
        self._perform_actions(self._residency.tick(at))

    def _free_cached_memory(self, at: float) -> None:
        """If a block waits for GPU memory, free the memory that this worker's engines cache for later batches."""
        if self._next_cache_release <= at and self._residency.is_short_of_device():
            self._next_cache_release = at + CACHE_RELEASE_S
            self._owner.spawn(asyncio.to_thread(free_cached_memory))

    def flush(self) -> None:
        """Add what was counted since the last call to the shared metrics."""
        for resident in self._resident.values():
            runner = resident.runner
            runner.counts.flush()
            self._set_instance_gauges(
                runner.description, runner.waiting, runner.idle, runner.description.instances - runner.idle
            )

    def leave(self) -> None:
        """Refuse new jobs, and return the jobs that have not started."""
        self._is_leaving = True
        self._holders.clear()
        for dormant in self._dormant.values():
            self._return_jobs(dormant.hand_back())
        for resident in self._resident.values():
            self._return_jobs(resident.runner.hand_back())

    async def drain(self) -> None:
        """Wait until no job is running."""
        await asyncio.gather(*(each.runner.drain() for each in (*self._resident.values(), *self._ending)))

    async def close(self) -> None:
        """Close all models within `CLOSE_S`. Call this after `drain`, or to abandon running jobs."""
        ending = [asyncio.create_task(resident.end(END_S)) for resident in self._resident.values()]
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_S)
        await self._placement.close()
        self._loader.shutdown(wait=False, cancel_futures=True)

    # --- actions

    def _update_residency(self) -> float:
        """Pass the blocks in use and the free GPU memory to `Residency.record_use`; return the current time."""
        at = now()
        busy = [block_id for block_id, each in self._resident.items() if len(each.runner)]
        used = [block_id for block_id, each in self._resident.items() if each.has_run()]
        rooms = {device: self._claims.free_room(device) for device in self._residency.devices_wanted()}
        self._residency.record_use(busy, used, at, rooms)
        return at

    def _perform_actions(self, actions: Iterable[Action]) -> None:
        if self._is_leaving:
            return
        must_report = False
        for action in actions:
            match action:
                case residency_actions.SurveyBlocks():
                    self._owner.spawn(self._survey_blocks(action.blocks))
                case residency_actions.LoadBlock():
                    if self._claims.claim(action.device, action.device_bytes):
                        self._owner.spawn(self._load_block(action))
                    else:
                        self._residency.on_postponed(action.block)
                case residency_actions.MakeBlockDormant():
                    self._make_dormant(action.block_id)
                case residency_actions.UnloadBlock():
                    self._unload_block(action.block_id, action.event)
                case residency_actions.ForgetBlock():
                    self._forget_block(action.block_id)
                case residency_actions.FailBlock():
                    self._fail_block(action)
            must_report = must_report or not isinstance(
                action, residency_actions.SurveyBlocks | residency_actions.LoadBlock
            )
        if must_report:
            self._owner.announce()
            self._owner.report()

    async def _survey_blocks(self, blocks: Sequence[BlockAssignment]) -> None:
        """Survey models in local folders one after the other, and models that must be downloaded in parallel."""
        for block in blocks:
            if block.folder.startswith(REGISTRY_SOURCE):
                self._owner.spawn(self._survey_one(block))
            else:
                await self._survey_one(block)

    async def _survey_one(self, block: BlockAssignment) -> None:
        try:
            opened = await self._sources.open(block.folder)
            try:
                found = await asyncio.to_thread(survey, block, opened.folder, self._gpus)
            finally:
                opened.close()
        except Exception as error:  # noqa: BLE001 - any error is reported
            self._on_load_failed(block, error)
            return
        held = self._residency.held_blocks.get(block.block_id)
        if held is not None and held.block == block:
            self._descriptions[block.block_id] = found.description  # the folder may have changed
        self._perform_actions(self._residency.on_surveyed(block, found.estimate, self._update_residency()))

    def _on_load_failed(self, block: BlockAssignment, error: Exception) -> None:
        """Report a failed load; retry later if the model could not be downloaded or the GPU was full."""
        is_device_full = isinstance(error, DeviceOutOfMemory)
        self._perform_actions(
            self._residency.on_load_failed(block, get_message(error), self._update_residency(), is_device_full)
        )

        async def retry() -> None:
            await asyncio.sleep(RETRY_S)
            held = self._residency.held_blocks.get(block.block_id)
            if held is not None and held.block == block and not self._is_leaving:
                await self._survey_one(block)

        if is_device_full or (isinstance(error, Unavailable) and block.folder.startswith(REGISTRY_SOURCE)):
            self._owner.spawn(retry())

    async def _load_block(self, action: residency_actions.LoadBlock) -> None:
        block, started = action.block, now()
        if action.reason is LoadReason.DEMAND:
            self._count_event(block, "woken")
        try:
            opened = await self._sources.open(block.folder)
            try:
                loaded, tasks = await self._load_in_thread(block, opened.folder)
            except BaseException:
                opened.close()
                raise
        except Exception as error:  # noqa: BLE001 - a model may raise any error, which is reported
            self._claims.release()
            self._on_load_failed(block, error)
            return
        self._claims.release()
        gpu = self._gpus.find(loaded.description.device)
        on_device = (gpu.device, loaded.device_bytes) if gpu is not None else ("", 0)
        is_wanted, actions = self._residency.on_loaded(block, loaded.size_bytes, self._update_residency(), on_device)
        if is_wanted and not self._is_leaving:
            self._use_loaded(loaded, tasks, opened)
            _log_loaded(loaded.description, action.reason, now() - started)
            self._count_event(block, "loaded")
        else:
            self._owner.spawn(self._discard_loaded(loaded, tasks, opened))
        self._perform_actions(actions)
        self._owner.report()

    async def _load_in_thread(self, block: BlockAssignment, folder: Path) -> tuple[LoadedBlock, TaskPool | None]:
        """Return the loaded model, with its task pool if it uses task processes."""
        home = EngineHome(self._config.data_dir, self._config.worker.engine_cache_bytes)
        config, loop = self._config, asyncio.get_running_loop()
        arguments = (block.block_id, folder, block.version, config.limits, home, self._gpus, self._choose_engine)
        loaded = await loop.run_in_executor(self._loader, load_block, *arguments)
        try:
            return loaded, await self._placement.open(loaded)
        except BaseException:
            await asyncio.to_thread(loaded.engine.close)
            raise

    def _use_loaded(self, loaded: LoadedBlock, tasks: TaskPool | None, files: OpenedFiles) -> None:
        block_id = loaded.description.block_id
        old = self._resident.get(block_id)
        runner = make_runner(loaded, self._tools, tasks)
        self._resident[block_id] = ResidentBlock(runner, loaded.size_bytes, files, loaded.device_bytes)
        self._holders[block_id] = runner
        dormant = self._dormant.pop(block_id, None)
        if dormant is not None:
            dormant.hand_over(runner)
        self._owner.announce()
        if old is not None:
            self._start_ending(old)

    def _make_dormant(self, block_id: str) -> None:
        described = self._descriptions[block_id]
        dormant = self._dormant.get(block_id)
        if dormant is not None:
            dormant.description = described
            return
        dormant = DormantBlock(
            described, lambda: self.wake(block_id), _earlier_statistics(self._earlier_totals, described), self._metrics
        )
        self._dormant[block_id] = self._holders[block_id] = dormant

    def _unload_block(self, block_id: str, event: str) -> None:
        resident = self._resident.pop(block_id)
        del self._holders[block_id]
        description = self._descriptions[block_id] = resident.runner.description
        log.info(event, model=description.model, version=description.version)
        self._count_event(description, event)
        self._set_instance_gauges(description, 0, 0, 0)
        self._return_jobs(resident.runner.hand_back())
        self._start_ending(resident)
        if event == "unloaded":
            self._forget_block(block_id)

    def _forget_block(self, block_id: str) -> None:
        self._descriptions.pop(block_id, None)
        dormant = self._dormant.pop(block_id, None)
        if dormant is not None:
            del self._holders[block_id]
            self._return_jobs(dormant.hand_back())

    def _fail_block(self, action: residency_actions.FailBlock) -> None:
        block = action.block
        log.error("load_failed", model=block.model, version=block.version, reason=action.reason)
        self._count_event(block, "failed")
        dormant = self._dormant.pop(block.block_id, None)
        if dormant is not None:
            del self._holders[block.block_id]
            dormant.fail(action.reason, DeviceOutOfMemory if action.is_device_full else ModelNotReady)

    def _return_jobs(self, jobs: list[WorkerJob]) -> None:
        if jobs:
            self._owner.announce()  # first, because the gateways would otherwise send the jobs here again
            self._owner.hand_back(jobs)

    # --- unloading

    def _start_ending(self, resident: ResidentBlock) -> None:
        self._ending.append(resident)
        self._owner.spawn(self._end_resident(resident))

    async def _end_resident(self, resident: ResidentBlock) -> None:
        """Let running jobs finish until their deadlines, keep the block's counts, and free the model."""
        await resident.end(resident.runner.max_remaining_s() + self._config.data_plane.drain_s)
        resident.files.close()
        self._ending.remove(resident)
        size_bytes, counted = resident.size_bytes, resident.runner.statistics
        _earlier_statistics(self._earlier_totals, counted).merge(counted)
        del resident
        await self._release_memory(size_bytes)

    async def _discard_loaded(self, loaded: LoadedBlock, tasks: TaskPool | None, files: OpenedFiles) -> None:
        """Close a model that was loaded, but is no longer needed."""
        files.close()
        if tasks is not None:
            tasks.close()
        await asyncio.to_thread(loaded.engine.close)
        await self._release_memory(loaded.size_bytes)

    async def _release_memory(self, size_bytes: int) -> None:
        """Return the memory of a closed model to the system, in a thread because that takes milliseconds."""
        await asyncio.to_thread(gc.collect)
        await asyncio.to_thread(trim)
        self._perform_actions(self._residency.on_released(size_bytes, self._update_residency()))

    def _set_instance_gauges(self, block: BlockDescription, waiting: int, idle: int, busy: int) -> None:
        labels = (block.model, block.version)
        self._metrics.waiting.labels(*labels).set(waiting)
        self._metrics.instances.labels(*labels, "idle").set(idle)
        self._metrics.instances.labels(*labels, "busy").set(busy)

    def _count_event(self, block: BlockAssignment | BlockDescription, event: str) -> None:
        self._metrics.loads.labels(block.model, block.version, event).inc()


def _log_loaded(block: BlockDescription, reason: LoadReason, took_s: float) -> None:
    log.info(
        "loaded",
        model=block.model,
        version=block.version,
        platform=block.platform,
        precision=block.precision,
        device=block.device,
        why=reason,
        seconds=round(took_s, 3),
    )


def _earlier_statistics(
    total: dict[str, BlockStatistics], block: BlockStatistics | BlockDescription
) -> BlockStatistics:
    """Return the totals of the block's earlier runners; create an entry if there is none."""
    return total.setdefault(block.block_id, BlockStatistics(block.block_id, block.model, block.version))
