"""The worker: holds the blocks that the manager assigns and serves the gateways that it names."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import Config
from penstock.core.errors import PenstockError
from penstock.core.statistics import BlockStatistics
from penstock.pb.v1 import job_pb2, manager_pb2, manager_pb2_grpc
from penstock.telemetry.metrics import WorkerMetrics
from penstock.telemetry.traces import Traces
from penstock.wire import frames
from penstock.wire.descriptions import encode_description
from penstock.wire.sockets import host_identity
from penstock.worker.link import GatewayLink, LinkOwner
from penstock.worker.loading import LoadedBlock, credits, load_block
from penstock.worker.residency import Assigned, Load, Residency, Unload
from penstock.worker.runner import BlockRunner

log = structlog.get_logger()
MANAGER_RETRY_S = 0.5
EXPIRY_S = 0.05
FLUSH_S = 0.25  # counts to the shared metrics
FAREWELL_S = 1.0  # what gateways get to answer the last hello


class Worker:
    def __init__(self, worker_id: str, manager: str, config: Config, metrics: WorkerMetrics, traces: Traces) -> None:
        self._worker_id = worker_id
        self._manager = manager
        self._config = config
        self._metrics = metrics
        self._traces = traces
        # A new life is a new identity: what the gateways had with the old one must not reach this one.
        self._identity = f"{worker_id}/{os.getpid()}/{secrets.token_hex(4)}".encode()
        self._host = host_identity()
        self._residency = Residency()
        self._runners: dict[str, BlockRunner] = {}
        self._past: dict[str, BlockStatistics] = {}  # of blocks that were let go
        self._links: dict[str, GatewayLink] = {}
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="task")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._report = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    async def run(self, stop: asyncio.Event) -> None:
        for coroutine in (self._attend_manager(), self._beat_forever(), self._expire_forever()):
            self._spawn(coroutine)
        await stop.wait()
        await self._drain()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker_task_failed", error=repr(error))

    # --- the manager

    async def _attend_manager(self) -> None:
        """Attaches, and attaches again when the manager was away; the blocks serve on meanwhile."""
        while True:
            try:
                async with grpc.aio.insecure_channel(self._manager) as channel:
                    stub = manager_pb2_grpc.ManagerStub(channel)
                    async for assignment in stub.Attach(self._reports()):
                        self._assigned(assignment)
            except grpc.aio.AioRpcError as error:
                log.debug("manager_away", error=error.details())
            await asyncio.sleep(MANAGER_RETRY_S)

    async def _reports(self) -> AsyncIterator[manager_pb2.WorkerReport]:
        while True:
            self._report.clear()
            yield manager_pb2.WorkerReport(
                worker_id=self._worker_id,
                pid=os.getpid(),
                blocks=[
                    manager_pb2.BlockState(
                        block_id=block_id, state=held.state, reason=held.reason, revision=held.block.revision
                    )
                    for block_id, held in self._residency.held.items()
                ],
            )
            try:
                await asyncio.wait_for(self._report.wait(), self._config.data_plane.beat_s)
            except TimeoutError:
                pass

    def _assigned(self, assignment: manager_pb2.Assignment) -> None:
        if self._is_draining:
            return
        self._meet(assignment.gateways)
        blocks = [Assigned(b.block_id, b.model, b.version, b.folder, b.revision) for b in assignment.blocks]
        self._perform(self._residency.assign(blocks))
        self._report.set()

    def _perform(self, actions: Iterable[Load | Unload]) -> None:
        for action in actions:
            if isinstance(action, Load):
                self._spawn(self._load(action.block))
            else:
                self._let_go(action.block_id, "unloaded")

    def _meet(self, endpoints: Iterable[str]) -> None:
        wanted = set(endpoints)
        for endpoint in [known for known in self._links if known not in wanted]:
            self._links.pop(endpoint).close("no longer a gateway of this cluster")
        for endpoint in wanted - set(self._links):
            owner = LinkOwner(self._runner_for, self._hello, self._statistics)
            self._links[endpoint] = GatewayLink(endpoint, self._identity, owner)
        self._announce()

    # --- blocks

    def _runner_for(self, block_id: str) -> BlockRunner | None:
        """None: jobs of this block go back, as those do that were sent before the gateway knew that we leave."""
        return None if self._is_draining else self._runners.get(block_id)

    async def _load(self, block: Assigned) -> None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        labels = (block.model, block.version)
        try:
            loaded = await loop.run_in_executor(
                self._loader,
                load_block,
                block.block_id,
                Path(block.folder),
                block.version,
                self._config.limits,
            )
        except Exception as error:  # noqa: BLE001 - a model that cannot load is reported, whatever it raised
            reason = error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            log.error("load_failed", model=block.model, version=block.version, reason=reason)
            self._metrics.loads.labels(*labels, "failed").inc()
            self._perform(self._residency.failed(block, reason))
        else:
            is_wanted, actions = self._residency.loaded(block)
            if is_wanted and not self._is_draining:
                self._take_up(loaded)
                seconds = round(time.monotonic() - started, 3)
                log.info("loaded", model=block.model, version=block.version, seconds=seconds)
                self._metrics.loads.labels(*labels, "loaded").inc()
            else:
                loaded.engine.close()
            self._perform(actions)
        self._report.set()

    def _take_up(self, loaded: LoadedBlock) -> None:
        block_id = loaded.description.block_id
        old = self._runners.get(block_id)
        self._runners[block_id] = BlockRunner(loaded, self._pool, self._metrics, self._traces)
        self._announce()
        if old is not None:
            self._spawn(self._retire(old))

    def _let_go(self, block_id: str, event: str) -> None:
        runner = self._runners.pop(block_id, None)
        if runner is None:
            return
        description = runner.description
        log.info(event, model=description.model, version=description.version)
        self._metrics.loads.labels(description.model, description.version, event).inc()
        self._announce()
        self._hand_back(runner)
        self._spawn(self._retire(runner))

    async def _retire(self, runner: BlockRunner) -> None:
        """Lets what runs end, keeps the counts, and frees the model."""
        try:
            await asyncio.wait_for(runner.drain(), self._config.data_plane.drain_s)
        except TimeoutError:
            log.warning("drain_timeout", model=runner.description.model, jobs=len(runner))
        kept = self._past.setdefault(
            runner.description.block_id,
            BlockStatistics(runner.description.block_id, runner.description.model, runner.description.version),
        )
        kept.merge(runner.statistics)
        runner.close()

    def _hand_back(self, runner: BlockRunner) -> None:
        jobs = runner.hand_back()
        for link in self._links.values():
            link.hand_back(jobs)

    def _announce(self) -> None:
        for link in self._links.values():
            link.say_hello()

    def _hello(self) -> job_pb2.Hello:
        runners = {} if self._is_draining else self._runners
        return job_pb2.Hello(
            protocol=frames.PROTOCOL,
            worker_id=self._worker_id,
            host=self._host,
            pid=os.getpid(),
            blocks=[self._offer(runner.description) for runner in runners.values()],
        )

    def _offer(self, block: BlockDescription) -> job_pb2.BlockOffer:
        share = max(1, credits(block.settings, block.instances) // max(1, len(self._links)))
        return job_pb2.BlockOffer(
            block_id=block.block_id,
            model=block.model,
            version=block.version,
            credits=share,
            description=encode_description(block),
        )

    def _statistics(self) -> list[BlockStatistics]:
        total: dict[str, BlockStatistics] = {}
        for statistics in (*self._past.values(), *(runner.statistics for runner in self._runners.values())):
            known = total.setdefault(
                statistics.block_id,
                BlockStatistics(statistics.block_id, statistics.model, statistics.version),
            )
            known.merge(statistics)
        return list(total.values())

    # --- time

    async def _beat_forever(self) -> None:
        process = psutil.Process()
        while True:
            memory_bytes = process.memory_info().rss
            self._metrics.memory_bytes.labels(self._worker_id).set(memory_bytes)
            for runner in self._runners.values():
                labels = (runner.description.model, runner.description.version)
                self._metrics.waiting.labels(*labels).set(runner.waiting)
                self._metrics.instances.labels(*labels, "idle").set(runner.idle)
                self._metrics.instances.labels(*labels, "busy").set(runner.description.instances - runner.idle)
            for link in self._links.values():
                link.beat(self._config.data_plane.silence_s, memory_bytes)
            await asyncio.sleep(self._config.data_plane.beat_s)

    async def _expire_forever(self) -> None:
        next_flush = 0.0
        while True:
            await asyncio.sleep(EXPIRY_S)
            at = time.monotonic()
            is_flush_due = at >= next_flush
            if is_flush_due:
                next_flush = at + FLUSH_S
            for runner in self._runners.values():
                if runner.waiting:
                    runner.expire(at)
                if is_flush_due:
                    runner.flush_metrics()

    async def _drain(self) -> None:
        """Takes no more, hands back what waits, ends what runs, says goodbye."""
        self._is_draining = True
        log.info("draining", jobs=sum(len(runner) for runner in self._runners.values()))
        self._announce()
        runners = list(self._runners.values())
        for runner in runners:
            self._hand_back(runner)
        drains = asyncio.gather(*(runner.drain() for runner in runners))
        try:
            await asyncio.wait_for(drains, self._config.data_plane.drain_s)
        except TimeoutError:
            log.warning("drain_timeout", jobs=sum(len(runner) for runner in runners))
        await self._farewell()
        for link in self._links.values():
            link.close("the worker stops")
        for task in list(self._tasks):
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _farewell(self) -> None:
        """Waits until every gateway knows that we take no more, so that no job is on its way to a closed door."""
        end = time.monotonic() + FAREWELL_S
        while time.monotonic() < end and not all(link.is_hello_answered for link in self._links.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
