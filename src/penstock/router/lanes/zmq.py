"""The ZeroMQ lane: workers connect to this gateway's socket, say hello, beat, and take jobs."""

import asyncio
import time
from functools import partial

import structlog

from penstock.core.config import DataPlane
from penstock.core.errors import WireError
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.lanes.lane import LaneOwner
from penstock.router.lanes.members import Members, ZmqMember
from penstock.router.lanes.peer_door import PeerDoor
from penstock.router.slots import Job, Offer
from penstock.telemetry.metrics import RouterMetrics
from penstock.wire import frames
from penstock.wire.beats import GatewayHeart
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.endpoints import Endpoint
from penstock.wire.failures import decode_failure
from penstock.wire.forms import decode_description, decode_devices, decode_statistics
from penstock.wire.sockets import RouterSocket

log = structlog.get_logger()
now = time.monotonic
QUERY_TIMEOUT_S = 1.0
PATIENCE = 2  # turns of the loop that a few jobs wait for others
# With so many a worker may begin while this loop reads the next. Over REST alone: elsewhere calls share a connection,
# and answers that come together are one write, which wakes the client once.
ENOUGH = frames.FEW


class ZmqLane:
    """A Lane whose workers are known by the identity of their socket."""

    def __init__(
        self,
        gateway_id: str,
        settings: DataPlane,
        metrics: RouterMetrics,
        owner: LaneOwner,
        zone: str = "",
        peers: PeerDoor | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """Other gateways come to the same socket, where somebody hears them. With keys, what comes from other hosts is
        encrypted."""
        self._keys = keys
        self._gateway_id = gateway_id
        self._settings = settings
        self._metrics = metrics
        self._owner = owner
        self._peers = peers
        self._members = Members(zone, self._remove)
        self._queries: dict[int, dict[bytes, asyncio.Event]] = {}  # by id, who is asked
        self._last_query = 0
        self._next_beat = 0.0
        self._socket: RouterSocket | None = None
        self._heart: GatewayHeart | None = None

    def listen(self, endpoint: Endpoint) -> str:
        """Returns what workers connect to."""
        self._socket = RouterSocket(self._on_message)
        reached = self._socket.bind(endpoint, self._keys)
        if self._peers is not None:
            self._peers.open(self._send)
        self._heart = GatewayHeart(endpoint.beside(), self._settings.beat_s, self._keys)
        return reached

    # --- what the owner asks for

    def send(self, worker: bytes, job: Job) -> None:
        at, request = now(), job.request
        told = (job.job_id, job.attempt, job.block_id, job.deadline - at, request, job.queue_deadline - at)
        outbox = self._members.by_key[worker].jobs_out
        if outbox is None or (size_bytes := frames.size_of(request.inputs)) > frames.TOGETHER_BYTES:
            self._send_job(worker, frames.encode_job(*told, job.answers_ahead))
        else:
            most = ENOUGH if request.protocol == "rest" else frames.MOST_TOGETHER
            frames.add_job(outbox.room(size_bytes, most), *told, job.answers_ahead)

    def cancel(self, worker: bytes, job_id: int) -> None:
        self._say(worker, pb.Frame(cancel=pb.Cancel(job_ids=[job_id])))

    def recall(self, worker: bytes, job_id: int) -> None:
        self._say(worker, pb.Frame(recall=pb.Recall(job_ids=[job_id])))

    def allow(self, worker: bytes, job_id: int, answers: int) -> None:
        self._say(worker, pb.Frame(more=pb.More(job_id=job_id, credits=answers)))

    def probe(self, worker: bytes, block_id: str) -> None:
        self._say(worker, pb.Frame(probe=pb.Probe(block_id=block_id)))

    def wake(self, worker: bytes, block_id: str) -> None:
        self._say(worker, pb.Frame(wake=pb.Wake(block_id=block_id)))

    async def statistics(self) -> list[BlockStatistics]:
        """Asked from the workers now; one that does not answer in time counts with its last answer."""
        self._last_query = query_id = self._last_query + 1
        query = frames.encode(pb.Frame(statistics_query=pb.StatisticsQuery(query_id=query_id)))
        asked = self._queries[query_id] = {key: asyncio.Event() for key in self._members.by_key}
        for key in asked:
            self._send(key, query)
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                for answered in list(asked.values()):
                    await answered.wait()
        except TimeoutError:
            log.warning("statistics_late", workers=sum(not answered.is_set() for answered in asked.values()))
        finally:
            del self._queries[query_id]
        return self._members.statistics()

    def tick(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + self._settings.beat_s
        if self._peers is not None:
            self._peers.tick(now)
        beat = frames.encode(pb.Frame(beat=pb.Beat(sent_ns=time.time_ns(), jobs=self._owner.jobs())))
        for member in list(self._members.by_key.values()):
            if self._silent_s(member, now) > self._settings.silence_s:
                self._remove(member.key, "silent")
            else:
                self._send(member.key, beat)

    def close(self) -> None:
        for member in list(self._members.by_key.values()):
            self._say(member.key, pb.Frame(bye=pb.Bye(reason="the gateway stops")))
        if self._peers is not None:
            self._peers.close()
        self._members.close()
        if self._socket is not None:
            self._socket.close(linger_ms=200)
        if self._heart is not None:
            self._heart.close()

    def _silent_s(self, member: ZmqMember, now: float) -> float:
        """Its loop may be busy, and so may ours have been: the hearts beat on."""
        silent_s = now - member.last_heard
        return silent_s if self._heart is None else min(silent_s, self._heart.silences.of(member.key))

    # --- what workers say

    def _on_message(self, identity: bytes, message: list[Buffer]) -> None:
        try:
            kind, frame = frames.decode(message)
            member = self._members.by_key.get(identity)
            if member is not None:
                member.last_heard = now()
                self._on_frame(member, kind, frame, message)
            elif kind == "hello":
                self._on_hello(identity, frame.hello)
            elif self._peers is not None and self._peers.hears(identity, kind):
                self._peers.hear(identity, kind, frame, message)
            else:
                if kind in ("result", "results"):
                    self._metrics.late_replies.inc()  # of a worker that was taken for dead
                raise WireError("say hello first", reason=frames.UNKNOWN_WORKER)
        except WireError as error:
            self._metrics.wire_errors.inc()
            log.debug("wire_error", peer=identity.hex(), error=error.message)
            self._send(identity, frames.encode_refused(error))

    def _on_frame(self, member: ZmqMember, kind: str, frame: pb.Frame, message: list[Buffer]) -> None:
        match kind:
            case "result":
                self._on_result(member.key, frame.result, message)
            case "results":
                self._on_results(member.key, frame.results)
            case "beat":
                member.jobs, member.memory_bytes = frame.beat.jobs, frame.beat.memory_bytes
                member.devices = decode_devices(frame.beat.devices)
            case "hello":
                self._on_hello(member.key, frame.hello)
            case "hand_back":
                self._owner.handed_back(member.key, frame.hand_back.job_ids)
            case "probe_result":
                self._owner.probed(member.key, frame.probe_result.block_id, frame.probe_result.problem)
            case "statistics":
                member.statistics = decode_statistics(frame.statistics)
                self._count_in(self._queries.get(frame.statistics.query_id, {}), member.key)
            case "bye":
                self._remove(member.key, "left")
            case _:
                raise WireError(f"a worker does not send {kind}")

    def _on_result(self, identity: bytes, result: pb.Result, message: list[Buffer]) -> None:
        if result.HasField("failure"):
            self._owner.answered(identity, result.job_id, result.attempt, decode_failure(result.failure))
            return
        self._owner.answered(identity, result.job_id, result.attempt, frames.response(result, message))

    def _on_results(self, identity: bytes, results: pb.Results) -> None:
        """What is wrong with one is no fault of the others."""
        wrong: WireError | None = None
        for result in results.results:
            failure = decode_failure(result.failure) if result.HasField("failure") else None
            try:
                outcome = failure or frames.small_response(result)
                self._owner.answered(identity, result.job_id, result.attempt, outcome)
            except WireError as error:
                wrong = error
        if wrong is not None:
            raise wrong

    def _on_hello(self, identity: bytes, hello: pb.Hello) -> None:
        if hello.protocol != frames.PROTOCOL:
            raise WireError(f"protocol {hello.protocol} is not spoken here: use {frames.PROTOCOL}")
        blocks = {offer.block_id: decode_description(offer.description) for offer in hello.blocks}
        if any(block_id != block.block_id for block_id, block in blocks.items()):
            raise WireError("an offer names one block and describes another")
        member = self._members.by_key.get(identity)
        if member is not None and member.connection != hello.connection:
            self._remove(identity, "broken")
            member = None
        if member is None:
            member = ZmqMember(
                identity,
                hello.worker_id,
                hello.pid,
                self,
                hello.zone,
                host=hello.host,
                connection=hello.connection,
                last_heard=now(),
            )
            if not self._members.add(member):
                return
            if self._heart is not None:
                self._heart.silences.follow(identity)
        if hello.takes_jobs and member.jobs_out is None:
            member.jobs_out = frames.FrameOutbox("jobs", partial(self._send_job, identity), PATIENCE)
        before = member.resident()
        member.blocks = blocks
        member.dormant = {offer.block_id for offer in hello.blocks if offer.is_dormant}
        beats = "" if self._heart is None else self._heart.endpoint
        welcome = pb.Welcome(gateway_id=self._gateway_id, beat_s=self._settings.beat_s, beats=beats, takes_results=True)
        self._say(identity, pb.Frame(welcome=welcome))
        distance = self._members.distance(member)
        offers = [
            Offer(offer.block_id, offer.credits, hello.worker_id, offer.weight or 1.0, distance)
            for offer in hello.blocks
        ]
        self._owner.joined(member, offers, before - member.resident())

    # --- what the above is made of

    def _remove(self, identity: bytes, reason: str) -> None:
        member = self._members.remove(identity, reason)
        if member is not None:
            if self._heart is not None:
                self._heart.silences.forget(identity)
            for asked in self._queries.values():
                self._count_in(asked, identity)
            self._owner.left(member, reason)

    def _count_in(self, asked: dict[bytes, asyncio.Event], identity: bytes) -> None:
        if identity in asked:
            asked[identity].set()

    def _say(self, identity: bytes, frame: pb.Frame) -> None:
        self._send(identity, frames.encode(frame))

    def _send_job(self, identity: bytes, message: list[Buffer]) -> None:
        if not self._send(identity, message):
            asyncio.get_running_loop().call_soon(self._remove, identity, "unreachable")

    def _send(self, identity: bytes, message: list[Buffer]) -> bool:
        """Behind the jobs that came before it."""
        member = self._members.by_key.get(identity)
        if member is not None and member.jobs_out is not None:
            member.jobs_out.flush()
        return self._socket is not None and self._socket.send(identity, message)
