"""The shell around the job table: performs its actions on the ZeroMQ lane and completes the futures."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import structlog

from penstock.core.blocks import BlockDescription
from penstock.core.config import DataPlane
from penstock.core.errors import PenstockError, WireError
from penstock.core.requests import InferRequest, InferResponse
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.jobs import Action, CancelOn, Fail, Job, JobTable, Retry, Send
from penstock.telemetry.metrics import RouterMetrics
from penstock.wire import frames
from penstock.wire.descriptions import decode_description
from penstock.wire.sockets import RouterSocket, host_identity
from penstock.wire.statistics import decode_statistics

log = structlog.get_logger()
now = time.monotonic
TICK_S = 0.02
STATISTICS_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Worker:
    identity: bytes
    worker_id: str
    pid: int
    last_heard: float
    blocks: dict[str, BlockDescription] = field(default_factory=dict)
    jobs: int = 0
    memory_bytes: int = 0
    statistics: list[BlockStatistics] = field(default_factory=list)
    pidfd: int = -1


class Dispatcher:
    """Owns the job table, the router socket and what is known of workers. Used from one event loop."""

    def __init__(
        self,
        gateway_id: str,
        settings: DataPlane,
        metrics: RouterMetrics,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._gateway_id = gateway_id
        self._settings = settings
        self._metrics = metrics
        self._on_change = on_change
        self._host = host_identity()
        self._table = JobTable(settings.max_attempts, Random())
        self._futures: dict[int, asyncio.Future[InferResponse]] = {}
        self._workers: dict[bytes, Worker] = {}
        self._departed: dict[str, BlockStatistics] = {}  # what workers that are gone had done
        self._queries: dict[int, tuple[set[bytes], asyncio.Event]] = {}
        # Ids of an earlier life of this gateway must not be met again in late replies.
        self._next_id = time.time_ns() & 0x7FFF_FFFF_FFFF_FFFF
        self._socket: RouterSocket | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._handlers = {
            "result": self._on_result,
            "beat": self._on_beat,
            "hello": self._on_hello,
            "hand_back": self._on_hand_back,
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
        for worker in list(self._workers.values()):
            self._send(worker.identity, frames.encode(pb.Frame(bye=pb.Bye(reason="the gateway stops"))))
            self._close_pidfd(worker)
        if self._socket is not None:
            self._socket.close(linger_ms=200)

    # --- what serving asks for

    async def run(self, block: BlockDescription, request: InferRequest, deadline: float) -> InferResponse:
        """Raises QueueFull at once, or what became of the job. Cancelling it cancels the job."""
        self._next_id = job_id = self._next_id + 1
        job = Job(job_id, block.block_id, request, deadline, block.settings.is_idempotent)
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self._futures[job_id] = future
        try:
            actions = self._table.submit(job, now())
            if actions:
                self._perform(actions)
            return await future
        except asyncio.CancelledError:
            self._perform(self._table.cancel(job_id, now()))
            raise
        finally:
            del self._futures[job_id]

    def declare(self, block_id: str, max_queue: int) -> None:
        self._table.declare(block_id, max_queue)

    def retire(self, block_id: str, error: PenstockError) -> None:
        self._perform(self._table.retire(block_id, error))

    def descriptions(self) -> dict[str, BlockDescription]:
        """The blocks that some worker holds ready."""
        return {block_id: block for worker in self._workers.values() for block_id, block in worker.blocks.items()}

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def jobs(self) -> int:
        return len(self._table)

    def queue_lengths(self) -> dict[str, tuple[int, int]]:
        """Block to waiting and running."""
        return {block: (self._table.queue_length(block), self._table.running(block)) for block in self._table.blocks()}

    async def statistics(self) -> list[BlockStatistics]:
        """Asked from the workers now; one that does not answer in time counts with its last answer."""
        self._next_id = query_id = self._next_id + 1
        asked = set(self._workers)
        answered = asyncio.Event()
        self._queries[query_id] = (asked, answered)
        query = frames.encode(pb.Frame(statistics_query=pb.StatisticsQuery(query_id=query_id)))
        for identity in list(asked):
            self._send(identity, query)
        try:
            if asked:
                await asyncio.wait_for(answered.wait(), STATISTICS_TIMEOUT_S)
        except TimeoutError:
            log.warning("statistics_late", workers=len(asked))
        finally:
            del self._queries[query_id]
        return self._total_statistics()

    # --- what workers say

    def _on_message(self, identity: bytes, message: list[Buffer]) -> None:
        try:
            kind, frame = frames.decode(message)
            handler = self._handlers.get(kind)
            if handler is None:
                raise WireError(f"a worker does not send {kind}")
            worker = self._workers.get(identity)
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
        job, actions = self._table.complete(identity, result.job_id, result.attempt, now())
        if actions:
            self._perform(actions)
        if job is None:
            self._metrics.late_replies.inc()
            return
        if result.HasField("failure"):
            self._settle(job, frames.failure(result))
        else:
            request = job.request
            self._settle(
                job,
                InferResponse(
                    request.model,
                    request.version,
                    request.request_id,
                    frames.tensors(result.outputs, message),
                    frames.timing(result),
                    frames.parameters(result.parameters) if result.parameters else {},
                ),
            )

    def _on_hello(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        hello = frame.hello
        if hello.protocol != frames.PROTOCOL:
            raise WireError(f"protocol {hello.protocol} is not spoken here: use {frames.PROTOCOL}")
        blocks = {offer.block_id: decode_description(offer.description) for offer in hello.blocks}
        if any(block_id != block.block_id for block_id, block in blocks.items()):
            raise WireError("an offer names one block and describes another")
        worker = self._workers.get(identity)
        if worker is None:
            worker = Worker(identity, hello.worker_id, hello.pid, now())
            if not self._watch_process(worker, hello.host):
                return
            self._workers[identity] = worker
            log.info("worker_joined", worker=worker.worker_id, pid=worker.pid)
        worker.blocks = blocks
        for block in blocks.values():
            self._table.declare(block.block_id, block.settings.batching.max_queue)
        welcome = pb.Welcome(gateway_id=self._gateway_id, beat_s=self._settings.beat_s)
        self._send(identity, frames.encode(pb.Frame(welcome=welcome)))
        self._perform(self._table.join(identity, [(o.block_id, o.credits) for o in hello.blocks], now()))
        self._on_change()

    def _on_beat(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        worker = self._workers[identity]
        worker.jobs, worker.memory_bytes = frame.beat.jobs, frame.beat.memory_bytes

    def _on_hand_back(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        self._perform(self._table.hand_back(identity, frame.hand_back.job_ids, now()))

    def _on_bye(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        self._remove(identity, "left")

    def _on_statistics(self, identity: bytes, frame: pb.Frame, message: list[Buffer]) -> None:
        self._workers[identity].statistics = decode_statistics(frame.statistics)
        query = self._queries.get(frame.statistics.query_id)
        if query is not None:
            query[0].discard(identity)
            if not query[0]:
                query[1].set()

    # --- workers' lives

    def _watch_process(self, worker: Worker, host: str) -> bool:
        """On one machine the kernel tells of a death at once; elsewhere the heartbeats do. False: dead already."""
        if host != self._host:
            return True
        try:
            worker.pidfd = os.pidfd_open(worker.pid)
        except (OSError, OverflowError):
            return False
        asyncio.get_running_loop().add_reader(worker.pidfd, self._remove, worker.identity, "died")
        return True

    def _close_pidfd(self, worker: Worker) -> None:
        if worker.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1

    def _remove(self, identity: bytes, reason: str) -> None:
        worker = self._workers.pop(identity, None)
        if worker is None:
            return
        self._close_pidfd(worker)
        log.info("worker_gone", worker=worker.worker_id, pid=worker.pid, reason=reason)
        self._metrics.workers_lost.labels(reason).inc()
        for statistics in worker.statistics:
            known = self._departed.setdefault(
                statistics.block_id,
                BlockStatistics(statistics.block_id, statistics.model, statistics.version),
            )
            known.merge(statistics)
        for asked, answered in self._queries.values():
            asked.discard(identity)
            if not asked:
                answered.set()
        self._perform(self._table.leave(identity, now()))
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
        for worker in list(self._workers.values()):
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

    def _send_job(self, identity: bytes, job: Job) -> None:
        encoded = frames.encode_job(job.job_id, job.attempt, job.block_id, job.deadline - now(), job.request)
        if not self._send(identity, encoded):
            # Not from here: the table is in the midst of handing out actions.
            asyncio.get_running_loop().call_soon(self._remove, identity, "unreachable")

    def _send(self, identity: bytes, message: list[Buffer]) -> bool:
        return self._socket is not None and self._socket.send(identity, message)

    def _settle(self, job: Job, outcome: InferResponse | PenstockError) -> None:
        future = self._futures.get(job.job_id)
        if future is None or future.done():
            return
        if isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _total_statistics(self) -> list[BlockStatistics]:
        total: dict[str, BlockStatistics] = {}
        living = (statistics for worker in self._workers.values() for statistics in worker.statistics)
        for statistics in (*self._departed.values(), *living):
            known = total.setdefault(
                statistics.block_id,
                BlockStatistics(statistics.block_id, statistics.model, statistics.version),
            )
            known.merge(statistics)
        return list(total.values())
