"""The dispatcher: performs the job table's actions on lanes and completes the callers' futures."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from random import Random

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import BUG_MESSAGE, InternalError, PenstockError, WireError
from penstock.core.requests import NO_CONTROLS, InferRequest, InferResponse
from penstock.core.settings import Routing
from penstock.core.statistics import BlockStatistics, merge_by_block
from penstock.router.actions import (
    Action,
    CancelJob,
    CountRetry,
    FailJob,
    RecallJob,
    ReportEjection,
    ReportRestoration,
    SendJob,
    SendProbe,
)
from penstock.router.answers import MAX_ANSWERS_AHEAD
from penstock.router.jobs import JobTable
from penstock.router.lanes.lane import ConnectedWorker, Lane
from penstock.router.queues import BlockRules
from penstock.router.slots import BlockActivity, Job, Offer, SlotState
from penstock.telemetry.background import BackgroundTasks
from penstock.telemetry.metrics import RouterMetrics

log = structlog.get_logger()
now = time.monotonic
TICK_S = 0.02


class Dispatcher:
    """Runs jobs: owns the job table and the list of workers on all lanes (transports). Used from one event loop."""

    def __init__(
        self,
        metrics: RouterMetrics,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[bytes, Iterable[str]], None] = lambda worker, blocks: None,
    ) -> None:
        """Create a dispatcher without lanes.

        `on_change` is called when workers or their blocks change, and `on_lost` with a worker and the blocks that the
        worker no longer has in memory.
        """
        self._metrics = metrics
        self._on_change = on_change
        self._on_lost = on_lost
        self._table = JobTable(Random().random)
        self._futures: dict[int, asyncio.Future[InferResponse]] = {}
        self._lanes: list[Lane] = []
        self._members: dict[bytes, ConnectedWorker] = {}
        self._routings: dict[str, Routing] = {}  # by block; set at run time, they replace those of the model's settings
        # Ids start at the current time, so that a late reply to an earlier process of this gateway matches no new job.
        self._next_id = time.time_ns() & 0x7FFF_FFFF_FFFF_FFFF
        self._tasks = BackgroundTasks("dispatcher")

    def add(self, lane: Lane) -> None:
        self._lanes.append(lane)

    def start(self) -> None:
        self._tasks.supervise("dispatcher", self._tick_all, every=TICK_S)

    async def stop(self) -> None:
        await self._tasks.close()
        for lane in self._lanes:
            lane.close()

    # --- called by serving

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        """Run a request; return the last answer, and put the earlier answers into `request.answers`.

        Cancelling the call cancels the job. Raise QueueFull at once if the job may not wait.
        """
        job = self._create_job(block, request, deadline)
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self._futures[job.job_id] = future
        try:
            self._perform(self._table.submit(job, now()))
            return await future
        except asyncio.CancelledError:
            self._perform(self._table.cancel(job.job_id, now()))
            raise
        finally:
            del self._futures[job.job_id]
            del future  # breaks a reference cycle: its error refers to this stack frame, and so to the request

    def _create_job(self, block: BlockDescription, request: InferRequest, deadline: float) -> Job:
        self._next_id = job_id = self._next_id + 1
        job = Job(job_id, block.block_id, request, deadline, block.settings.is_idempotent)
        if request.controls is not NO_CONTROLS:
            job.apply_controls(request.controls, block.settings, now())
        if request.answers is not None:
            job.answers_ahead = MAX_ANSWERS_AHEAD
            request.answers.begin(MAX_ANSWERS_AHEAD, partial(self._grant_credits, job))
        return job

    def _grant_credits(self, job: Job, answers: int) -> None:
        """Allow the job's worker to send this many more answers."""
        if job.slot is not None:
            self._members[job.slot.worker].lane.allow(job.slot.worker, job.job_id, answers)

    def retire_blocks(self, blocks: Mapping[str, PenstockError]) -> None:
        """Withdraw these blocks. Waiting jobs run if a worker still has their block; otherwise these jobs fail."""
        self._perform(self._table.retire_blocks(blocks))

    def set_routings(self, routings: dict[str, Routing]) -> None:
        """Replace the routing settings of all blocks by these. Waiting jobs stay in their queues."""
        if routings == self._routings:
            return
        self._routings = dict(routings)
        self._declare_blocks(self.list_descriptions().values())

    def get_routing(self, block: BlockDescription) -> Routing:
        return self._routings.get(block.block_id, block.settings.routing)

    def list_slot_states(self, block_id: str) -> list[SlotState]:
        return self._table.list_slot_states(block_id, now())

    def find_owner(self, block_id: str, key: str) -> ConnectedWorker | None:
        """Return the worker that runs the block's requests with this routing key."""
        worker = self._table.find_owner(block_id, key)
        return None if worker is None else self._members[worker]

    def wake(self, block_id: str) -> None:
        """Ask a worker to load a dormant block; the worker calls `add_worker` again when the block is loaded."""
        holder = next((member for member in self._members.values() if block_id in member.dormant), None)
        if holder is not None:
            holder.lane.wake(holder.key, block_id)

    def probe(self, block_id: str) -> None:
        """Ask the block's workers to report whether the block works."""
        for member in self._members.values():
            if block_id in member.list_loaded_blocks():
                member.lane.probe(member.key, block_id)

    def list_descriptions(self) -> dict[str, BlockDescription]:
        """Return descriptions of the blocks that workers hold, in memory or dormant; full descriptions are preferred.

        A block has no fingerprint if workers loaded the block from different files, as happens during a reload.
        """
        found: dict[str, BlockDescription] = {}
        for member in self._members.values():
            for block_id, block in member.blocks.items():
                known = found.get(block_id)
                if known is None or not known.is_described:
                    found[block_id] = block
                elif block.is_described and block.fingerprint != known.fingerprint:
                    found[block_id] = replace(block, fingerprint="")
        return found

    def list_workers(self) -> list[ConnectedWorker]:
        return list(self._members.values())

    def count_jobs(self) -> int:
        return len(self._table)

    def count_jobs_by_block(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of waiting and of running jobs, by block."""
        return self._table.count_jobs()

    def describe_activities(self) -> dict[str, BlockActivity]:
        return self._table.describe_activities()

    async def collect_statistics(self) -> list[BlockStatistics]:
        return merge_by_block(
            chain.from_iterable(await asyncio.gather(*[lane.collect_statistics() for lane in self._lanes]))
        )

    # --- called by lanes: LaneOwner

    def add_worker(self, member: ConnectedWorker, offers: Collection[Offer], lost: Collection[str]) -> None:
        self._members[member.key] = member
        self._declare_blocks(member.blocks.values())
        self._perform(self._table.join(member.key, offers, now()))
        if lost:
            self._on_lost(member.key, lost)
        self._on_change()

    def remove_worker(self, member: ConnectedWorker, reason: str) -> None:
        del self._members[member.key]
        self._metrics.workers_lost.labels(reason).inc()
        self._perform(self._table.leave(member.key, now(), member.is_expected_back))
        self._on_lost(member.key, member.list_loaded_blocks())
        self._on_change()

    def receive_answer(self, worker: bytes, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            job, actions = self._table.complete(worker, job_id, attempt, now(), outcome.code, outcome.message)
        elif outcome.is_final:
            job, actions = self._table.complete(worker, job_id, attempt, now())
        else:
            self._forward_partial(worker, job_id, attempt, outcome)
            return
        if actions:
            self._perform(actions)
        if job is None:
            self._metrics.late_replies.inc()
            return
        if (session := job.request.controls.session) is not None:
            session.home = job.home
        self._complete_future(
            job, outcome if isinstance(outcome, PenstockError) else _set_request_ids(outcome, job.request)
        )

    def _forward_partial(self, worker: bytes, job_id: int, attempt: int, response: InferResponse) -> None:
        job = self._table.find_for_partial(worker, job_id, attempt, now())
        if job is None or job.request.answers is None:
            self._metrics.late_replies.inc()
            return
        job.has_answered = True
        if not job.request.answers.put(_set_request_ids(response, job.request)):
            raise WireError(f"a worker may send at most {MAX_ANSWERS_AHEAD} answers before the caller takes them")

    def take_back_jobs(self, worker: bytes, job_ids: Iterable[int]) -> None:
        self._perform(self._table.hand_back(worker, job_ids, now()))

    def receive_probe_result(self, worker: bytes, block_id: str, problem: str) -> None:
        is_idle = worker in self._members and not self._members[worker].jobs
        self._perform(self._table.receive_probe_result(worker, block_id, problem, now(), is_idle))

    # --- internals

    def _declare_blocks(self, blocks: Iterable[BlockDescription]) -> None:
        for block in blocks:
            self._table.declare_block(
                block.block_id, BlockRules.from_settings(block.settings, self._routings.get(block.block_id))
            )

    def _tick_all(self) -> None:
        """Tick the job table and all lanes, even if one tick fails, because without ticks no deadline expires."""
        errors: list[Exception] = []
        for tick in (self._tick, *[lane.tick for lane in self._lanes]):
            try:
                tick(now())
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise ExceptionGroup("ticks failed", errors)

    def _tick(self, now_s: float) -> None:
        actions = self._table.tick(now_s)
        if actions:
            self._perform(actions)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendJob):
                try:
                    self._members[action.worker].lane.send(action.worker, action.job)
                except Exception as error:  # noqa: BLE001 - any error of encoding
                    # Only this job fails. If its slot can run another job, this loop also performs the action appended.
                    log.error("bug", where="send", block=action.job.block_id, error=repr(error)[:200])
                    actions += [
                        FailJob(action.job, InternalError(BUG_MESSAGE)),
                        *self._table.cancel(action.job.job_id, now()),
                    ]
            elif isinstance(action, FailJob):
                self._complete_future(action.job, action.error)
            elif isinstance(action, CancelJob):
                self._members[action.worker].lane.cancel(action.worker, action.job_id)
            elif isinstance(action, RecallJob):
                self._members[action.worker].lane.recall(action.worker, action.job_id)
            elif isinstance(action, CountRetry):
                self._metrics.retries.labels(action.reason).inc()
            elif isinstance(action, SendProbe):
                self._members[action.worker].lane.probe(action.worker, action.block_id)
            elif isinstance(action, ReportEjection):
                self._metrics.ejections.labels("ejected").inc()
                # The ejected worker gets no more requests of the block's sessions.
                self._on_lost(action.worker, (action.block_id,))
                worker = self._members[action.worker].worker_id
                log.warning("worker_ejected", worker=worker, block=action.block_id, reason=action.reason)
            elif isinstance(action, ReportRestoration):
                self._metrics.ejections.labels("restored").inc()
                log.info("worker_restored", worker=self._members[action.worker].worker_id, block=action.block_id)

    def _complete_future(self, job: Job, outcome: InferResponse | PenstockError) -> None:
        future = self._futures.get(job.job_id)
        if future is None or future.done():
            return
        if isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _set_request_ids(response: InferResponse, request: InferRequest) -> InferResponse:
    response.model, response.version, response.request_id = request.model, request.version, request.request_id
    return response
