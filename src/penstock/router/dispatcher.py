"""The shell around the job table: performs its actions on the ZeroMQ lane and completes the futures."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from random import Random

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import DataPlane
from penstock.core.errors import PenstockError, WireError
from penstock.core.requests import PLAIN, InferRequest, InferResponse
from penstock.core.settings import Routing
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.answers import Answers, response_to
from penstock.router.jobs import (
    Action,
    BlockRules,
    CancelOn,
    Ejected,
    Fail,
    Job,
    JobTable,
    Offer,
    Probe,
    Restored,
    Retry,
    Send,
    SlotStanding,
)
from penstock.router.members import Members, Worker
from penstock.router.queries import Queries
from penstock.telemetry.metrics import RouterMetrics
from penstock.wire import frames
from penstock.wire.descriptions import decode_description
from penstock.wire.sockets import RouterSocket
from penstock.wire.statistics import decode_statistics

log = structlog.get_logger()
now = time.monotonic
TICK_S = 0.02
# Answers of a decoupled model that may be on their way to a caller that has not taken them.
ANSWERS_AHEAD = 8


class Dispatcher:
    """Owns the job table, the router socket and what is known of workers. Used from one event loop."""

    def __init__(
        self,
        gateway_id: str,
        settings: DataPlane,
        metrics: RouterMetrics,
        on_change: Callable[[], None] = lambda: None,
        zone: str = "",
        on_lost: Callable[[bytes, Iterable[str]], None] = lambda worker, blocks: None,
    ) -> None:
        """`on_lost` is told of a worker that no longer has these blocks in memory."""
        self._gateway_id = gateway_id
        self._settings = settings
        self._metrics = metrics
        self._on_change = on_change
        self._on_lost = on_lost
        self._table = JobTable(settings.max_attempts, Random())
        self._futures: dict[int, asyncio.Future[InferResponse]] = {}
        self._answers: dict[int, Answers] = {}
        self._members = Members(zone, self._remove)
        self._routings: dict[str, Routing] = {}  # set while the server runs; they stand before the model's own
        self._queries = Queries()
        # Ids of an earlier life of this gateway must not be met again in late replies.
        self._next_id = time.time_ns() & 0x7FFF_FFFF_FFFF_FFFF
        self._socket: RouterSocket | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._handlers = {
            "result": self._on_result,
            "beat": self._on_beat,
            "hello": self._on_hello,
            "hand_back": self._on_hand_back,
            "probe_result": self._on_probe_result,
            "statistics": self._on_statistics,
            "bye": self._on_bye,
        }

    def start(self, endpoint: str) -> str:
        self._socket = RouterSocket(self._on_message)
        bound = self._socket.bind(endpoint)
        self._ticker = asyncio.create_task(self._tick_forever(), name="dispatcher-ticker")
        return bound

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for worker in self._members.all():
            self._send(worker.identity, frames.encode(pb.Frame(bye=pb.Bye(reason="the gateway stops"))))
        self._members.close()
        if self._socket is not None:
            self._socket.close(linger_ms=200)

    # --- what serving asks for

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        """Raises QueueFull at once, or what became of the job. Cancelling it cancels the job."""
        job = self._job(block, request, deadline)
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self._futures[job.job_id] = future
        try:
            actions = self._table.submit(job, now())
            if actions:
                self._perform(actions)
            return await future
        except asyncio.CancelledError:
            self._perform(self._table.cancel(job.job_id, now()))
            raise
        finally:
            del self._futures[job.job_id]

    async def stream(
        self, block: BlockDescription, request: InferRequest, deadline: float
    ) -> AsyncGenerator[InferResponse, None]:
        """The answers of a decoupled model as they come; the worker makes more as they are taken."""
        job = self._job(block, request, deadline)
        answers = self._answers[job.job_id] = Answers(ANSWERS_AHEAD)
        is_over = False
        try:
            self._perform(self._table.submit(job, now()))
            while not is_over:
                response = await answers.get()
                is_over = response.is_final
                if not is_over and job.slot is not None:
                    more = pb.More(job_id=job.job_id, credits=1)
                    self._send(job.slot.worker, frames.encode(pb.Frame(more=more)))
                yield response
        except PenstockError:
            is_over = True
            raise
        finally:
            del self._answers[job.job_id]
            if not is_over:
                self._perform(self._table.cancel(job.job_id, now()))

    def _job(self, block: BlockDescription, request: InferRequest, deadline: float) -> Job:
        self._next_id = job_id = self._next_id + 1
        job = Job(job_id, block.block_id, request, deadline, block.settings.is_idempotent)
        if request.controls is not PLAIN:
            job.heed(request.controls, block.settings, now())
        return job

    def retire(self, block_id: str, error: PenstockError) -> None:
        self._perform(self._table.retire(block_id, error))

    def set_routings(self, routings: dict[str, Routing]) -> None:
        """By block, what stands before the models' own; takes effect at once, nothing that waits is lost."""
        if routings == self._routings:
            return
        self._routings = dict(routings)
        for block in self.descriptions().values():
            self._table.declare(block.block_id, self._rules(block))

    def routing(self, block: BlockDescription) -> Routing:
        return self._routings.get(block.block_id, block.settings.routing)

    def standing(self, block_id: str) -> list[SlotStanding]:
        return self._table.standing(block_id, now())

    def owner(self, block_id: str, key: str) -> Worker | None:
        """The worker that requests with this key go to."""
        identity = self._table.owner(block_id, key)
        return self._members.get(identity) if identity is not None else None

    def wake(self, block_id: str) -> None:
        """Asks a worker to load a dormant block; its next hello tells of it."""
        sleeper = next((worker for worker in self._members.all() if block_id in worker.dormant), None)
        if sleeper is not None:
            self._send(sleeper.identity, frames.encode(pb.Frame(wake=pb.Wake(block_id=block_id))))

    def descriptions(self) -> dict[str, BlockDescription]:
        """The blocks that some worker holds, in memory or dormant."""
        return self._members.descriptions()

    def workers(self) -> list[Worker]:
        return self._members.all()

    def jobs(self) -> int:
        return len(self._table)

    def queue_lengths(self) -> dict[str, tuple[int, int]]:
        """Block to waiting and running."""
        return {block: (self._table.queue_length(block), self._table.running(block)) for block in self._table.blocks()}

    async def statistics(self) -> list[BlockStatistics]:
        """Asked from the workers now; one that does not answer in time counts with its last answer."""
        self._next_id = query_id = self._next_id + 1
        asked = [worker.identity for worker in self._members.all()]
        self._queries.ask(query_id, asked)
        query = frames.encode(pb.Frame(statistics_query=pb.StatisticsQuery(query_id=query_id)))
        for identity in asked:
            self._send(identity, query)
        await self._queries.wait(query_id)
        return self._members.statistics()

    # --- what workers say

    def _on_message(self, identity: bytes, message: list[Buffer]) -> None:
        try:
            kind, frame = frames.decode(message)
            handler = self._handlers.get(kind)
            if handler is None:
                raise WireError(f"a worker does not send {kind}")
            worker = self._members.get(identity)
            if worker is None and kind != "hello":
                if kind == "result":
                    self._metrics.late_replies.inc()  # of a worker that was taken for dead
                raise WireError("say hello first", reason="unknown_worker")
            if worker is not None:
                worker.last_heard = now()
            handler(identity, frame, message)
        except WireError as error:
            self._metrics.wire_errors.inc()
            log.debug("wire_error", peer=identity.hex(), error=error.message)
            self._send(identity, frames.encode_refused(error))

    def _on_result(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        result = frame.result
        if result.is_partial:
            self._on_partial(identity, result, message)
            return
        error = frames.failure(result) if result.HasField("failure") else None
        if error is None:
            job, actions = self._table.complete(identity, result.job_id, result.attempt, now())
        else:
            job, actions = self._table.complete(
                identity, result.job_id, result.attempt, now(), error.code, error.message
            )
        if actions:
            self._perform(actions)
        if job is None:
            self._metrics.late_replies.inc()
            return
        if (session := job.request.controls.session) is not None:
            session.home = job.home
        self._settle(job, error or response_to(job.request, result, message))

    def _on_partial(self, identity: bytes, result: pb.Result, message: list[Buffer]) -> None:
        job = self._table.partial(identity, result.job_id, result.attempt)
        answers = self._answers.get(result.job_id)
        if job is None or answers is None:
            self._metrics.late_replies.inc()
            return
        job.is_idempotent = False  # what the caller has heard cannot be taken back
        response = response_to(job.request, result, message)
        response.is_final = False
        if not answers.put(response):
            raise WireError(f"more than {ANSWERS_AHEAD} answers of one job are ahead of its caller")

    def _on_hello(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        hello = frame.hello
        if hello.protocol != frames.PROTOCOL:
            raise WireError(f"protocol {hello.protocol} is not spoken here: use {frames.PROTOCOL}")
        blocks = {offer.block_id: decode_description(offer.description) for offer in hello.blocks}
        if any(block_id != block.block_id for block_id, block in blocks.items()):
            raise WireError("an offer names one block and describes another")
        worker = self._members.get(identity)
        if worker is None:
            worker = Worker(identity, hello.worker_id, hello.pid, now(), hello.host, hello.zone)
            if not self._members.add(worker):
                return
        before = worker.resident()
        worker.blocks = blocks
        worker.dormant = {offer.block_id for offer in hello.blocks if offer.is_dormant}
        for block in blocks.values():
            self._table.declare(block.block_id, self._rules(block))
        welcome = pb.Welcome(gateway_id=self._gateway_id, beat_s=self._settings.beat_s)
        self._send(identity, frames.encode(pb.Frame(welcome=welcome)))
        distance = self._members.distance(worker)
        offers = [
            Offer(offer.block_id, offer.credits, hello.worker_id, offer.weight or 1.0, distance)
            for offer in hello.blocks
        ]
        self._perform(self._table.join(identity, offers, now()))
        if lost := before - worker.resident():
            self._on_lost(identity, lost)
        self._on_change()

    def _rules(self, block: BlockDescription) -> BlockRules:
        return BlockRules.of(block.settings, self._routings.get(block.block_id))

    def _on_beat(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        worker = self._members.get(identity)
        if worker is not None:
            worker.jobs, worker.memory_bytes = frame.beat.jobs, frame.beat.memory_bytes

    def _on_hand_back(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        self._perform(self._table.hand_back(identity, frame.hand_back.job_ids, now()))

    def _on_probe_result(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        result = frame.probe_result
        self._perform(self._table.probed(identity, result.block_id, result.problem, now()))

    def _on_bye(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        self._remove(identity, "left")

    def _on_statistics(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        worker = self._members.get(identity)
        if worker is not None:
            worker.statistics = decode_statistics(frame.statistics)
        self._queries.answered(frame.statistics.query_id, identity)

    # --- workers' lives

    def _remove(self, identity: bytes, reason: str) -> None:
        worker = self._members.remove(identity, reason)
        if worker is None:
            return
        self._metrics.workers_lost.labels(reason).inc()
        self._queries.left(identity)
        self._perform(self._table.leave(identity, now()))
        self._on_lost(identity, worker.resident())
        self._on_change()

    async def _tick_forever(self) -> None:
        next_beat = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            at = now()
            actions = self._table.tick(at)
            if actions:
                self._perform(actions)
            if at >= next_beat:
                next_beat = at + self._settings.beat_s
                self._beat(at)

    def _beat(self, at: float) -> None:
        beat = frames.encode(pb.Frame(beat=pb.Beat(sent_ns=time.time_ns(), jobs=len(self._table))))
        for worker in self._members.all():
            if at - worker.last_heard > self._settings.silence_s:
                self._remove(worker.identity, "silent")
            else:
                self._send(worker.identity, beat)

    # --- actions

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send_job(action.worker, action.job)
            elif isinstance(action, Fail):
                self._settle(action.job, action.error)
            elif isinstance(action, CancelOn):
                self._send(action.worker, frames.encode(pb.Frame(cancel=pb.Cancel(job_ids=[action.job_id]))))
            elif isinstance(action, Retry):
                self._metrics.retries.labels(action.reason).inc()
            elif isinstance(action, Probe):
                self._send(action.worker, frames.encode(pb.Frame(probe=pb.Probe(block_id=action.block_id))))
            elif isinstance(action, Ejected):
                self._metrics.ejections.labels("ejected").inc()
                self._on_lost(action.worker, (action.block_id,))  # it gets no more of their sessions' requests
                log.warning("ejected", worker=self._name(action.worker), block=action.block_id, reason=action.reason)
            elif isinstance(action, Restored):
                self._metrics.ejections.labels("restored").inc()
                log.info("restored", worker=self._name(action.worker), block=action.block_id)

    def _name(self, identity: bytes) -> str:
        worker = self._members.get(identity)
        return worker.worker_id if worker else identity.hex()

    def _send_job(self, identity: bytes, job: Job) -> None:
        at = now()
        encoded = frames.encode_job(
            job.job_id,
            job.attempt,
            job.block_id,
            job.deadline - at,
            job.request,
            job.queue_deadline - at,
            ANSWERS_AHEAD if job.job_id in self._answers else 0,
        )
        if not self._send(identity, encoded):
            # Not from here: the table is in the midst of handing out actions.
            asyncio.get_running_loop().call_soon(self._remove, identity, "unreachable")

    def _send(self, identity: bytes, message: list[Buffer]) -> bool:
        return self._socket is not None and self._socket.send(identity, message)

    def _settle(self, job: Job, outcome: InferResponse | PenstockError) -> None:
        future = self._futures.get(job.job_id)
        if future is None:
            answers = self._answers.get(job.job_id)
            if answers is not None:
                answers.end(outcome)
        elif future.done():
            return
        elif isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
