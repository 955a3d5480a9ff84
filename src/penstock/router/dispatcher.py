"""The shell around the job table: performs its actions on lanes and completes the futures."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from random import Random

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.errors import BUG, InternalError, PenstockError, WireError
from penstock.core.requests import PLAIN, InferRequest, InferResponse
from penstock.core.settings import Routing
from penstock.core.statistics import BlockStatistics, summed
from penstock.router.actions import Action, CancelOn, Ejected, FailJob, Probe, RecallFrom, Restored, Retry, Send
from penstock.router.answers import AnswerStream
from penstock.router.jobs import JobTable
from penstock.router.lanes.lane import Lane, Member
from penstock.router.queues import BlockRules
from penstock.router.slots import BlockActivity, Job, Offer, SlotStanding
from penstock.telemetry.metrics import RouterMetrics

log = structlog.get_logger()
now = time.monotonic
TICK_S = 0.02
# Answers of a decoupled model that may be on their way to a caller that has not taken them.
ANSWERS_AHEAD = 8
ALLOWED_AT_ONCE = ANSWERS_AHEAD // 2  # further ones: a message for each would cost as much as the answers


class Dispatcher:
    """Owns the job table and what is known of workers, on whichever lane they are. Used from one event loop."""

    def __init__(
        self,
        max_attempts: int,
        metrics: RouterMetrics,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[bytes, Iterable[str]], None] = lambda worker, blocks: None,
    ) -> None:
        """`on_lost` is told of a worker that no longer has these blocks in memory."""
        self._metrics = metrics
        self._on_change = on_change
        self._on_lost = on_lost
        self._table = JobTable(max_attempts, Random().random)
        self._futures: dict[int, asyncio.Future[InferResponse]] = {}
        self._streams: dict[int, AnswerStream] = {}
        self._lanes: list[Lane] = []
        self._members: dict[bytes, Member] = {}
        self._routings: dict[str, Routing] = {}  # set while the server runs; they stand before the model's own
        # Ids of an earlier life of this gateway must not be met again in late replies.
        self._next_id = time.time_ns() & 0x7FFF_FFFF_FFFF_FFFF
        self._ticker: asyncio.Task[None] | None = None

    def add(self, lane: Lane) -> None:
        self._lanes.append(lane)

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick_forever(), name="dispatcher-ticker")

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for lane in self._lanes:
            lane.close()

    # --- what serving asks for

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        """Raises QueueFull at once, or what became of the job. Cancelling it cancels the job."""
        job = self._job(block, request, deadline)
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
            del future  # it keeps its error, which keeps this frame and with it the request

    async def stream(
        self, block: BlockDescription, request: InferRequest, deadline: float
    ) -> AsyncGenerator[InferResponse, None]:
        """The answers of a decoupled model as they come; the worker makes more as they are taken."""
        job = self._job(block, request, deadline)
        job.answers_ahead = ANSWERS_AHEAD
        answers = self._streams[job.job_id] = AnswerStream(ANSWERS_AHEAD)
        is_over, taken = False, 0
        try:
            self._perform(self._table.submit(job, now()))
            while not is_over:
                response = await answers.get()
                is_over = response.is_final
                taken += 1
                if taken == ALLOWED_AT_ONCE and not is_over and job.slot is not None:
                    self._members[job.slot.worker].lane.allow(job.slot.worker, job.job_id, taken)
                    taken = 0
                yield response
        except PenstockError:
            is_over = True
            raise
        finally:
            del self._streams[job.job_id]
            if not is_over:
                self._perform(self._table.cancel(job.job_id, now()))

    def _job(self, block: BlockDescription, request: InferRequest, deadline: float) -> Job:
        self._next_id = job_id = self._next_id + 1
        job = Job(job_id, block.block_id, request, deadline, block.settings.is_idempotent)
        if request.controls is not PLAIN:
            job.heed(request.controls, block.settings, now())
        return job

    def retire(self, blocks: Mapping[str, PenstockError]) -> None:
        """What waits for these blocks is run by the workers that have them still, and fails with the last of those."""
        self._perform(self._table.retire(blocks))

    def set_routings(self, routings: dict[str, Routing]) -> None:
        """By block, what stands before the model's own. It takes effect at once, and nothing that waits is lost."""
        if routings == self._routings:
            return
        self._routings = dict(routings)
        self._declare(self.descriptions().values())

    def routing(self, block: BlockDescription) -> Routing:
        return self._routings.get(block.block_id, block.settings.routing)

    def standing(self, block_id: str) -> list[SlotStanding]:
        return self._table.standing(block_id, now())

    def owner(self, block_id: str, key: str) -> Member | None:
        """The worker that requests with this key go to."""
        worker = self._table.owner(block_id, key)
        return None if worker is None else self._members[worker]

    def wake(self, block_id: str) -> None:
        """Asks a worker to load a dormant block, which tells of it when it joins again."""
        sleeper = next((member for member in self._members.values() if block_id in member.dormant), None)
        if sleeper is not None:
            sleeper.lane.wake(sleeper.key, block_id)

    def probe(self, block_id: str) -> None:
        """Asks its workers whether the block works."""
        for member in self._members.values():
            if block_id in member.resident():
                member.lane.probe(member.key, block_id)

    def descriptions(self) -> dict[str, BlockDescription]:
        """The blocks that some worker holds, in memory or dormant; who has described one counts before who has not.

        Where workers hold it of different files, as while it is loaded anew, it has no fingerprint.
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

    def workers(self) -> list[Member]:
        return list(self._members.values())

    def jobs(self) -> int:
        return len(self._table)

    def queue_lengths(self) -> dict[str, tuple[int, int]]:
        """How many jobs wait and how many run, by block."""
        return self._table.lengths()

    def activities(self) -> dict[str, BlockActivity]:
        return self._table.activities()

    async def statistics(self) -> list[BlockStatistics]:
        return summed(chain.from_iterable(await asyncio.gather(*[lane.statistics() for lane in self._lanes])))

    # --- what lanes tell: a LaneOwner

    def joined(self, member: Member, offers: Collection[Offer], lost: Collection[str]) -> None:
        self._members[member.key] = member
        self._declare(member.blocks.values())
        self._perform(self._table.join(member.key, offers, now()))
        if lost:
            self._on_lost(member.key, lost)
        self._on_change()

    def left(self, member: Member, reason: str) -> None:
        del self._members[member.key]
        self._metrics.workers_lost.labels(reason).inc()
        self._perform(self._table.leave(member.key, now()))
        self._on_lost(member.key, member.resident())
        self._on_change()

    def answered(self, worker: bytes, job_id: int, attempt: int, outcome: InferResponse | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            job, actions = self._table.complete(worker, job_id, attempt, now(), outcome.code, outcome.message)
        elif outcome.is_final:
            job, actions = self._table.complete(worker, job_id, attempt, now())
        else:
            self._answered_in_part(worker, job_id, attempt, outcome)
            return
        if actions:
            self._perform(actions)
        if job is None:
            self._metrics.late_replies.inc()
            return
        if (session := job.request.controls.session) is not None:
            session.home = job.home
        self._settle(job, outcome if isinstance(outcome, PenstockError) else _of_request(outcome, job.request))

    def _answered_in_part(self, worker: bytes, job_id: int, attempt: int, response: InferResponse) -> None:
        job = self._table.partial(worker, job_id, attempt, now())
        answers = self._streams.get(job_id)
        if job is None or answers is None:
            self._metrics.late_replies.inc()
            return
        job.has_answered = True
        if not answers.put(_of_request(response, job.request)):
            raise WireError(f"more than {ANSWERS_AHEAD} answers of one job are ahead of its caller")

    def handed_back(self, worker: bytes, job_ids: Iterable[int]) -> None:
        self._perform(self._table.hand_back(worker, job_ids, now()))

    def probed(self, worker: bytes, block_id: str, problem: str) -> None:
        is_idle = worker in self._members and not self._members[worker].jobs
        self._perform(self._table.probed(worker, block_id, problem, now(), is_idle))

    # --- what the above is made of

    def _declare(self, blocks: Iterable[BlockDescription]) -> None:
        for block in blocks:
            self._table.declare(block.block_id, BlockRules.of(block.settings, self._routings.get(block.block_id)))

    async def _tick_forever(self) -> None:
        """Whatever goes wrong in a tick, the next one comes: without them nothing would ever expire."""
        while True:
            await asyncio.sleep(TICK_S)
            for tick in (self._tick, *[lane.tick for lane in self._lanes]):
                try:
                    tick(now())
                except Exception:
                    log.exception("bug", where="dispatcher-ticker")

    def _tick(self, at: float) -> None:
        actions = self._table.tick(at)
        if actions:
            self._perform(actions)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                try:
                    self._members[action.worker].lane.send(action.worker, action.job)
                except Exception as error:  # noqa: BLE001 - whatever it is that cannot be encoded
                    # It fails alone, and its credit goes to the next: that is appended, and performed in this loop.
                    log.error("bug", where="send", block=action.job.block_id, error=repr(error)[:200])
                    actions += [FailJob(action.job, InternalError(BUG)), *self._table.cancel(action.job.job_id, now())]
            elif isinstance(action, FailJob):
                self._settle(action.job, action.error)
            elif isinstance(action, CancelOn):
                self._members[action.worker].lane.cancel(action.worker, action.job_id)
            elif isinstance(action, RecallFrom):
                self._members[action.worker].lane.recall(action.worker, action.job_id)
            elif isinstance(action, Retry):
                self._metrics.retries.labels(action.reason).inc()
            elif isinstance(action, Probe):
                self._members[action.worker].lane.probe(action.worker, action.block_id)
            elif isinstance(action, Ejected):
                self._metrics.ejections.labels("ejected").inc()
                self._on_lost(action.worker, (action.block_id,))  # it gets no more of their sessions' requests
                worker = self._members[action.worker].worker_id
                log.warning("ejected", worker=worker, block=action.block_id, reason=action.reason)
            elif isinstance(action, Restored):
                self._metrics.ejections.labels("restored").inc()
                log.info("restored", worker=self._members[action.worker].worker_id, block=action.block_id)

    def _settle(self, job: Job, outcome: InferResponse | PenstockError) -> None:
        future = self._futures.get(job.job_id)
        if future is None:
            answers = self._streams.get(job.job_id)
            if answers is not None:
                answers.end(outcome)
        elif future.done():
            return
        elif isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _of_request(response: InferResponse, request: InferRequest) -> InferResponse:
    response.model, response.version, response.request_id = request.model, request.version, request.request_id
    return response
