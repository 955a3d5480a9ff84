"""A worker's blocks, in memory and out of it: performs what residency decides."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import Config
from penstock.core.errors import DeviceOutOfMemory, ModelNotReady, Unavailable, message_of
from penstock.core.manifest import SOURCE
from penstock.core.statistics import BlockStatistics, summed
from penstock.engines.base import EngineHome
from penstock.engines.torch.reserved import give_back
from penstock.models.engine_choice.chooser import EngineChooser
from penstock.models.loading import LoadedBlock, load_block, trim
from penstock.models.registry.cache import OpenedModel
from penstock.models.registry.sources import ModelSources
from penstock.telemetry.control_groups import usable_cores
from penstock.telemetry.devices import Gpus
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.worker.job import Holder, WorkerJob
from penstock.worker.machine import OnDevice, find_siblings
from penstock.worker.offload.pool import TaskPlacement, TaskPool
from penstock.worker.residency import steps
from penstock.worker.residency.claims import DeviceClaims
from penstock.worker.residency.dormant import Dormant
from penstock.worker.residency.residency import HeldBlock, Residency
from penstock.worker.residency.resident import Resident, make_runner
from penstock.worker.residency.steps import Action, Assigned, Why
from penstock.worker.residency.survey import survey
from penstock.worker.running.cores import Cores
from penstock.worker.running.preparation import PreparedRoom
from penstock.worker.running.runner import WorkerTools

log = structlog.get_logger()
now = time.monotonic
CLOSE_S = 6.0  # what the models of a worker that leaves get to end
GIVE_BACK_S = 1.0  # between two times that engines are asked for a GPU's memory
AGAIN_S = 15.0  # after which a model that could not be fetched is asked for again
END_S = 0.1  # and what still runs, which `drain` has waited for


class WorkInHand(NamedTuple):
    jobs: int  # waiting and running
    waiting: int
    busy: int  # instances
    instances: int


@dataclass(slots=True)
class BlocksOwner:
    """What the blocks ask of their worker."""

    spawn: Callable[[Coroutine[None, None, None]], None]
    announce: Callable[[], None]  # other blocks are on offer now
    report: Callable[[], None]  # a block's state is another
    hand_back: Callable[[list[WorkerJob]], None]


class Blocks:
    def __init__(
        self,
        config: Config,
        metrics: WorkerMetrics,
        traces: Traces,
        owner: BlocksOwner,
        task_workers: Sequence[Path] = (),
        manager: Callable[[], str] = str,
        gpus: Gpus | None = None,
    ) -> None:
        """`task_workers` are their sockets; `manager` tells the one that models are fetched from."""
        self._config = config
        self._sources = ModelSources(config, manager)
        self._metrics = metrics
        self._owner = owner
        self._residency = Residency(config.worker.memory_budget_bytes, config.data_plane.drain_s)
        self._resident: dict[str, Resident] = {}
        self._ending: list[Resident] = []  # let go of, but still running
        self._dormant: dict[str, Dormant] = {}
        self._holders: dict[str, Holder] = {}  # of both: where a block's jobs go
        self._described: dict[str, BlockDescription] = {}  # out of memory: as it was in it, or as its folder says
        self._past: dict[str, BlockStatistics] = {}  # what runners that are gone have counted
        # Several workers would choose the same cores, not knowing of each other.
        cores = Cores(find_siblings()) if config.worker.own_cores and config.workers == 1 else None
        self._tools = WorkerTools(PreparedRoom(config.limits.max_prepared_bytes), metrics, traces, cores)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._placement = TaskPlacement(config.worker.task_process_count(config.workers, usable_cores()), task_workers)
        self._gpus = gpus or Gpus()
        self._claims = DeviceClaims(self._gpus)
        self._gives_back_at = 0.0
        self._choose_engine = EngineChooser(config.data_dir, config.worker.engine_trial_s).choose
        self._is_leaving = False

    def __len__(self) -> int:
        """The jobs here."""
        return sum(len(each.runner) for each in self._resident.values()) + sum(map(len, self._dormant.values()))

    def holder(self, block_id: str) -> Holder | None:
        """Where a block's jobs go. None: back, as those do that were sent before the gateway knew that we leave."""
        return self._holders.get(block_id)

    def offers(self) -> list[tuple[BlockDescription, bool]]:
        """The blocks that take jobs, and whether they are dormant."""
        if self._is_leaving:
            return []
        return [
            *((each.runner.description, False) for each in self._resident.values()),
            *((dormant.description, True) for dormant in self._dormant.values()),
        ]

    def held(self) -> Iterable[tuple[str, HeldBlock]]:
        return self._residency.held.items()

    def work(self) -> WorkInHand:
        runners = [each.runner for each in self._resident.values()]
        instances = sum(runner.description.instances for runner in runners)
        waiting = sum(runner.waiting for runner in runners) + sum(map(len, self._dormant.values()))
        return WorkInHand(len(self), waiting, instances - sum(runner.idle for runner in runners), instances)

    def on_devices(self) -> list[OnDevice]:
        """The blocks in memory that run on a GPU."""
        return [
            OnDevice(block_id, each.runner.description.device, each.device_bytes)
            for block_id, each in self._resident.items()
            if each.runner.description.device != "cpu"
        ]

    def names(self) -> dict[str, tuple[str, str]]:
        """Model and version of the blocks in memory."""
        described = {block_id: each.runner.description for block_id, each in self._resident.items()}
        return {block_id: (block.model, block.version) for block_id, block in described.items()}

    def statistics(self) -> list[BlockStatistics]:
        living = (each.runner.statistics for each in (*self._resident.values(), *self._ending))
        return summed((*self._past.values(), *living))

    # --- what happens

    def assign(self, blocks: Sequence[Assigned]) -> None:
        self._perform(self._residency.assign(blocks, self._look()))
        self._owner.report()

    def wake(self, block_id: str) -> None:
        self._perform(self._residency.demand(block_id, self._look()))

    def probe(self, block_id: str, done: Callable[[str], None]) -> None:
        """Tells what is wrong with the block, or nothing. A dormant one is not loaded for that."""
        resident = self._resident.get(block_id)
        if resident is not None:
            resident.runner.probe(done)
        else:
            done("" if block_id in self._dormant else "this worker does not hold the block")

    def tick(self) -> None:
        """Comes often enough that nobody waits noticeably longer than they should."""
        at = self._look()
        for block_id, dormant in self._dormant.items():
            kind = DeviceOutOfMemory if self._residency.lacks_device(block_id) else ModelNotReady
            dormant.expire(at, self._residency.why_waiting(block_id), kind)
        self._give_back(at)
        self._perform(self._residency.tick(at))

    def _give_back(self, at: float) -> None:
        """What engines here keep of a GPU for their next batches may be the room that somebody waits for."""
        if self._gives_back_at <= at and self._residency.is_short_of_device():
            self._gives_back_at = at + GIVE_BACK_S
            self._owner.spawn(asyncio.to_thread(give_back))

    def flush(self) -> None:
        """Brings the shared metrics up to date."""
        for resident in self._resident.values():
            runner = resident.runner
            runner.counts.flush()
            self._show(runner.description, runner.waiting, runner.idle, runner.description.instances - runner.idle)

    def leave(self) -> None:
        """Takes no more, and hands back what has not started."""
        self._is_leaving = True
        self._holders.clear()
        for dormant in self._dormant.values():
            self._hand_back(dormant.hand_back())
        for resident in self._resident.values():
            self._hand_back(resident.runner.hand_back())

    async def drain(self) -> None:
        """Returns when nothing runs."""
        await asyncio.gather(*(each.runner.drain() for each in (*self._resident.values(), *self._ending)))

    async def close(self) -> None:
        """Call it after `drain`, or to abandon what runs. Models with code of their own are told, within a bound."""
        ending = [asyncio.create_task(resident.end(END_S)) for resident in self._resident.values()]
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_S)
        await self._placement.close()
        self._loader.shutdown(wait=False, cancel_futures=True)

    # --- what is decided

    def _look(self) -> float:
        """Tells residency who is in use; returns when that was."""
        at = now()
        busy = [block_id for block_id, each in self._resident.items() if len(each.runner)]
        used = [block_id for block_id, each in self._resident.items() if each.has_run()]
        rooms = {device: self._claims.room(device) for device in self._residency.devices_wanted()}
        self._residency.look(busy, used, at, rooms)
        return at

    def _perform(self, actions: Iterable[Action]) -> None:
        if self._is_leaving:
            return
        is_other = False
        for action in actions:
            match action:
                case steps.SurveyBlocks():
                    self._owner.spawn(self._survey(action.blocks))
                case steps.LoadBlock():
                    if self._claims.claim(action.device, action.device_bytes):
                        self._owner.spawn(self._load(action))
                    else:
                        self._residency.postponed(action.block)
                case steps.RestBlock():
                    self._rest(action.block_id)
                case steps.UnloadBlock():
                    self._unload(action.block_id, action.event)
                case steps.ForgetBlock():
                    self._forget(action.block_id)
                case steps.FailBlock():
                    self._fail(action)
            is_other = is_other or not isinstance(action, steps.SurveyBlocks | steps.LoadBlock)
        if is_other:
            self._owner.announce()
            self._owner.report()

    async def _survey(self, blocks: Sequence[Assigned]) -> None:
        """Folders in their order; nobody waits for what has to be fetched."""
        for block in blocks:
            if block.folder.startswith(SOURCE):
                self._owner.spawn(self._survey_one(block))
            else:
                await self._survey_one(block)

    async def _survey_one(self, block: Assigned) -> None:
        try:
            opened = await self._sources.open(block.folder)
            try:
                found = await asyncio.to_thread(survey, block, opened.folder, self._gpus)
            finally:
                opened.close()
        except Exception as error:  # noqa: BLE001 - it is reported, whatever is wrong with it
            self._failed(block, error)
            return
        held = self._residency.held.get(block.block_id)
        if held is not None and held.block == block:
            self._described[block.block_id] = found.description  # it may be another model now
        self._perform(self._residency.surveyed(block, found.outlook, self._look()))

    def _failed(self, block: Assigned, error: Exception) -> None:
        """What could not be fetched may be had later, and so may a GPU's memory: it is asked for for as long as the
        block is wanted."""
        is_device_full = isinstance(error, DeviceOutOfMemory)
        self._perform(self._residency.failed(block, message_of(error), self._look(), is_device_full))

        async def again() -> None:
            await asyncio.sleep(AGAIN_S)
            held = self._residency.held.get(block.block_id)
            if held is not None and held.block == block and not self._is_leaving:
                await self._survey_one(block)

        if is_device_full or (isinstance(error, Unavailable) and block.folder.startswith(SOURCE)):
            self._owner.spawn(again())

    async def _load(self, action: steps.LoadBlock) -> None:
        block, started = action.block, now()
        if action.why is Why.DEMAND:
            self._count(block, "woken")
        try:
            opened = await self._sources.open(block.folder)
            try:
                loaded, tasks = await self._load_there(block, opened.folder)
            except BaseException:
                opened.close()
                raise
        except Exception as error:  # noqa: BLE001 - a model that cannot load is reported, whatever it raised
            self._claims.release()
            self._failed(block, error)
            return
        self._claims.release()
        gpu = self._gpus.find(loaded.description.device)
        on_device = (gpu.device, loaded.device_bytes) if gpu is not None else ("", 0)
        is_wanted, actions = self._residency.loaded(block, loaded.size_bytes, self._look(), on_device)
        if is_wanted and not self._is_leaving:
            self._take_up(loaded, tasks, opened)
            seconds = round(now() - started, 3)
            log.info("loaded", model=block.model, version=block.version, why=action.why, seconds=seconds)
            self._count(block, "loaded")
        else:
            self._owner.spawn(self._discard(loaded, tasks, opened))
        self._perform(actions)
        self._owner.report()

    async def _load_there(self, block: Assigned, folder: Path) -> tuple[LoadedBlock, TaskPool | None]:
        """The model, and its place in task processes or task workers where it wants one."""
        home = EngineHome(self._config.data_dir, self._config.worker.engine_cache_bytes)
        config, loop = self._config, asyncio.get_running_loop()
        arguments = (block.block_id, folder, block.version, config.limits, home, self._gpus, self._choose_engine)
        loaded = await loop.run_in_executor(self._loader, load_block, *arguments)
        try:
            return loaded, await self._placement.open(loaded)
        except BaseException:
            await asyncio.to_thread(loaded.engine.close)
            raise

    def _take_up(self, loaded: LoadedBlock, tasks: TaskPool | None, files: OpenedModel) -> None:
        block_id = loaded.description.block_id
        old = self._resident.get(block_id)
        runner = make_runner(loaded, self._tools, tasks)
        self._resident[block_id] = Resident(runner, loaded.size_bytes, files, loaded.device_bytes)
        self._holders[block_id] = runner
        dormant = self._dormant.pop(block_id, None)
        if dormant is not None:
            dormant.hand_over(runner)
        self._owner.announce()
        if old is not None:
            self._retire(old)

    def _rest(self, block_id: str) -> None:
        described = self._described[block_id]
        dormant = self._dormant.get(block_id)
        if dormant is not None:
            dormant.description = described
            return
        dormant = Dormant(described, lambda: self.wake(block_id), _part(self._past, described), self._metrics)
        self._dormant[block_id] = self._holders[block_id] = dormant

    def _unload(self, block_id: str, event: str) -> None:
        resident = self._resident.pop(block_id)
        del self._holders[block_id]
        description = self._described[block_id] = resident.runner.description
        log.info(event, model=description.model, version=description.version)
        self._count(description, event)
        self._show(description, 0, 0, 0)
        self._hand_back(resident.runner.hand_back())
        self._retire(resident)
        if event == "unloaded":
            self._forget(block_id)

    def _forget(self, block_id: str) -> None:
        self._described.pop(block_id, None)
        dormant = self._dormant.pop(block_id, None)
        if dormant is not None:
            del self._holders[block_id]
            self._hand_back(dormant.hand_back())

    def _fail(self, action: steps.FailBlock) -> None:
        block = action.block
        log.error("load_failed", model=block.model, version=block.version, reason=action.reason)
        self._count(block, "failed")
        dormant = self._dormant.pop(block.block_id, None)
        if dormant is not None:
            del self._holders[block.block_id]
            dormant.fail(action.reason, DeviceOutOfMemory if action.is_device_full else ModelNotReady)

    def _hand_back(self, jobs: list[WorkerJob]) -> None:
        if jobs:
            self._owner.announce()  # first: or they would come here again
            self._owner.hand_back(jobs)

    # --- out of memory

    def _retire(self, resident: Resident) -> None:
        self._ending.append(resident)
        self._owner.spawn(self._end(resident))

    async def _end(self, resident: Resident) -> None:
        """Lets what runs end, by its own deadline, keeps the counts, and frees the model."""
        await resident.end(resident.runner.longest_s() + self._config.data_plane.drain_s)
        resident.files.close()
        self._ending.remove(resident)
        size_bytes, counted = resident.size_bytes, resident.runner.statistics
        _part(self._past, counted).merge(counted)
        del resident
        await self._release(size_bytes)

    async def _discard(self, loaded: LoadedBlock, tasks: TaskPool | None, files: OpenedModel) -> None:
        """It was loaded for nobody."""
        files.close()
        if tasks is not None:
            tasks.close()
        await asyncio.to_thread(loaded.engine.close)
        await self._release(loaded.size_bytes)

    async def _release(self, size_bytes: int) -> None:
        """Nothing refers to the model any more: what it held goes back to the system, in some milliseconds."""
        await asyncio.to_thread(gc.collect)
        await asyncio.to_thread(trim)
        self._perform(self._residency.released(size_bytes, self._look()))

    def _show(self, block: BlockDescription, waiting: int, idle: int, busy: int) -> None:
        labels = (block.model, block.version)
        self._metrics.waiting.labels(*labels).set(waiting)
        self._metrics.instances.labels(*labels, "idle").set(idle)
        self._metrics.instances.labels(*labels, "busy").set(busy)

    def _count(self, block: Assigned | BlockDescription, event: str) -> None:
        self._metrics.loads.labels(block.model, block.version, event).inc()


def _part(total: dict[str, BlockStatistics], of: BlockStatistics | BlockDescription) -> BlockStatistics:
    """What the block has in the total."""
    return total.setdefault(of.block_id, BlockStatistics(of.block_id, of.model, of.version))
