"""The socket lane: workers connect to this gateway's ZeroMQ socket, send hello and heartbeats, and get jobs.

The socket is a unix socket for workers on this host, or a TCP socket for workers on other hosts.
"""

import asyncio
import time
from functools import partial

import structlog

from penstock.core.config import DataPlane
from penstock.core.errors import WireError
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Buffer
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.lanes.lane import LaneOwner, PeerMessages
from penstock.router.lanes.lane_members import LEFT, SocketWorker, SocketWorkers
from penstock.router.slots import Job, Offer
from penstock.telemetry.metrics import RouterMetrics
from penstock.wire import job_messages
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.encodings import decode_description, decode_devices, decode_statistics
from penstock.wire.failures import decode_failure
from penstock.wire.heartbeats import GatewayHeartbeats
from penstock.wire.sockets import RouterSocket
from penstock.wire.zmq_endpoints import TCP_PREFIX, Endpoint

log = structlog.get_logger()
now = time.monotonic
QUERY_TIMEOUT_S = 1.0
MAX_DELAY_TURNS = 2  # turns of the event loop for which a few jobs wait for more jobs, to be sent in one message
# REST jobs are sent when this number of them wait, so that the worker starts while this loop reads the next requests.
# Other protocols share connections, so larger groups are better: jobs that are sent together are answered together,
# in one write that wakes the client once.
MIN_IMMEDIATE_JOBS = job_messages.MIN_IMMEDIATE_ENTRIES


class SocketLane:
    """A Lane to the workers that connect to this gateway's socket."""

    def __init__(
        self,
        gateway_id: str,
        settings: DataPlane,
        metrics: RouterMetrics,
        owner: LaneOwner,
        zone: str = "",
        peers: PeerMessages | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """Create a lane that does not listen yet.

        `peers` handles the messages of other gateways, which use the same socket. If `keys` is set, connections from
        other hosts are encrypted.
        """
        self._keys = keys
        self._gateway_id = gateway_id
        self._settings = settings
        self._metrics = metrics
        self._owner = owner
        self._peers = peers
        self._members = SocketWorkers(zone, self._remove)
        self._queries: dict[int, dict[bytes, asyncio.Event]] = {}  # by query id: workers and whether they answered
        self._last_query = 0
        self._next_beat = 0.0
        self._socket: RouterSocket | None = None
        self._heartbeats: GatewayHeartbeats | None = None

    def listen(self, endpoint: Endpoint) -> str:
        """Listen, and return the endpoint to which workers connect."""
        self._socket = RouterSocket(self._on_message)
        bound = self._socket.bind(endpoint, self._keys)
        self._members.is_local = not endpoint.bind.startswith(TCP_PREFIX)
        if self._peers is not None:
            self._peers.open(self._send_parts)
        self._heartbeats = GatewayHeartbeats(endpoint.make_heartbeat_endpoint(), self._settings.beat_s, self._keys)
        return bound

    # --- called by the owner

    def send(self, worker: bytes, job: Job) -> None:
        at, request = now(), job.request
        fields = (job.job_id, job.attempt, job.block_id, job.deadline - at, request, job.queue_deadline - at)
        outbox = self._members.by_key[worker].jobs_out
        if (
            outbox is None
            or (size_bytes := job_messages.count_bytes(request.inputs)) > job_messages.MAX_COMBINED_ENTRY_BYTES
        ):
            self._send_job(worker, job_messages.encode_job(*fields, job.answers_ahead))
        else:
            most = MIN_IMMEDIATE_JOBS if request.protocol == "rest" else job_messages.MAX_COMBINED_ENTRIES
            job_messages.add_job(outbox.list_for(size_bytes, most), *fields, job.answers_ahead)

    def cancel(self, worker: bytes, job_id: int) -> None:
        self._send(worker, pb.Header(cancel=pb.Cancel(job_ids=[job_id])))

    def recall(self, worker: bytes, job_id: int) -> None:
        self._send(worker, pb.Header(recall=pb.Recall(job_ids=[job_id])))

    def allow(self, worker: bytes, job_id: int, answers: int) -> None:
        self._send(worker, pb.Header(more=pb.More(job_id=job_id, credits=answers)))

    def probe(self, worker: bytes, block_id: str) -> None:
        self._send(worker, pb.Header(probe=pb.Probe(block_id=block_id)))

    def wake(self, worker: bytes, block_id: str) -> None:
        self._send(worker, pb.Header(wake=pb.Wake(block_id=block_id)))

    async def collect_statistics(self) -> list[BlockStatistics]:
        """Ask all workers for statistics; if a worker does not answer in time, use the worker's last answer."""
        self._last_query = query_id = self._last_query + 1
        query = job_messages.encode(pb.Header(statistics_query=pb.StatisticsQuery(query_id=query_id)))
        asked = self._queries[query_id] = {key: asyncio.Event() for key in self._members.by_key}
        for key in asked:
            self._send_parts(key, query)
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                for answered in list(asked.values()):
                    await answered.wait()
        except TimeoutError:
            log.warning("statistics_late", workers=sum(not answered.is_set() for answered in asked.values()))
        finally:
            del self._queries[query_id]
        return self._members.collect_statistics()

    def tick(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + self._settings.beat_s
        if self._peers is not None:
            self._peers.tick(now)
        beat = job_messages.encode(pb.Header(beat=pb.Beat(sent_ns=time.time_ns(), jobs=self._owner.count_jobs())))
        for member in list(self._members.by_key.values()):
            if self._compute_silence_s(member, now) > self._settings.silence_s:
                self._remove(member.key, "silent")
            else:
                self._send_parts(member.key, beat)

    def close(self) -> None:
        for member in list(self._members.by_key.values()):
            self._send(member.key, pb.Header(bye=pb.Bye(reason="the gateway stops")))
        if self._peers is not None:
            self._peers.close()
        self._members.close()
        if self._socket is not None:
            self._socket.close(linger_ms=200)
        if self._heartbeats is not None:
            self._heartbeats.close()

    def _compute_silence_s(self, member: SocketWorker, now: float) -> float:
        """Return the seconds since the last message or heartbeat of the worker.

        A separate thread of the worker sends heartbeats, so a busy event loop does not count as silence.
        """
        silent_s = now - member.last_message_at
        return silent_s if self._heartbeats is None else min(silent_s, self._heartbeats.silence.seconds(member.key))

    # --- messages of workers

    def _on_message(self, identity: bytes, message: list[Buffer]) -> None:
        try:
            kind, header = job_messages.decode(message)
            member = self._members.by_key.get(identity)
            if member is not None:
                member.last_message_at = now()
                self._dispatch(member, kind, header, message)
            elif kind == "hello":
                self._on_hello(identity, header.hello)
            elif self._peers is not None and self._peers.is_from_peer(identity, kind):
                self._peers.receive(identity, kind, header, message)
            else:
                if kind in ("result", "results"):
                    self._metrics.late_replies.inc()  # from a worker that was removed as silent
                raise WireError(
                    "the gateway does not know this worker: send a hello message first",
                    reason=job_messages.UNKNOWN_WORKER,
                )
        except WireError as error:
            self._metrics.wire_errors.inc()
            log.debug("wire_error", peer=identity.hex(), error=error.message)
            self._send_parts(identity, job_messages.encode_refused(error))

    def _dispatch(self, member: SocketWorker, kind: str, header: pb.Header, message: list[Buffer]) -> None:
        match kind:
            case "result":
                self._on_result(member.key, header.result, message)
            case "results":
                self._on_results(member.key, header.results)
            case "beat":
                member.jobs, member.memory_bytes = header.beat.jobs, header.beat.memory_bytes
                member.devices = decode_devices(header.beat.devices)
            case "hello":
                self._on_hello(member.key, header.hello)
            case "hand_back":
                self._owner.take_back_jobs(member.key, header.hand_back.job_ids)
            case "probe_result":
                self._owner.receive_probe_result(member.key, header.probe_result.block_id, header.probe_result.problem)
            case "statistics":
                member.statistics = decode_statistics(header.statistics)
                self._mark_answered(self._queries.get(header.statistics.query_id, {}), member.key)
            case "bye":
                self._remove(member.key, LEFT)
            case _:
                raise WireError(f"unexpected message '{kind}' from a worker")

    def _on_result(self, identity: bytes, result: pb.Result, message: list[Buffer]) -> None:
        if result.HasField("failure"):
            self._owner.receive_answer(identity, result.job_id, result.attempt, decode_failure(result.failure))
            return
        self._owner.receive_answer(
            identity, result.job_id, result.attempt, job_messages.decode_response(result, message)
        )

    def _on_results(self, identity: bytes, results: pb.Results) -> None:
        """Handle all results of one message; raise the WireError of an invalid result only at the end."""
        wrong: WireError | None = None
        for result in results.results:
            failure = decode_failure(result.failure) if result.HasField("failure") else None
            try:
                outcome = failure or job_messages.decode_small_response(result)
                self._owner.receive_answer(identity, result.job_id, result.attempt, outcome)
            except WireError as error:
                wrong = error
        if wrong is not None:
            raise wrong

    def _on_hello(self, identity: bytes, hello: pb.Hello) -> None:
        if hello.protocol != job_messages.PROTOCOL:
            raise WireError(f"protocol version {hello.protocol} is not supported: use version {job_messages.PROTOCOL}")
        blocks = {offer.block_id: decode_description(offer.description) for offer in hello.blocks}
        if any(block_id != block.block_id for block_id, block in blocks.items()):
            raise WireError("the block_id of an offer differs from the block_id in its description")
        member = self._members.by_key.get(identity)
        if member is not None and member.connection != hello.connection:
            self._remove(identity, "broken")
            member = None
        if member is None:
            member = SocketWorker(
                identity,
                hello.worker_id,
                hello.pid,
                self,
                hello.zone,
                host=hello.host,
                connection=hello.connection,
                last_message_at=now(),
            )
            if not self._members.add(member):
                return
            if self._heartbeats is not None:
                self._heartbeats.silence.track(identity)
        if hello.takes_jobs and member.jobs_out is None:
            member.jobs_out = job_messages.MessageOutbox("jobs", partial(self._send_job, identity), MAX_DELAY_TURNS)
        before = member.list_loaded_blocks()
        member.blocks = blocks
        member.dormant = {offer.block_id for offer in hello.blocks if offer.is_dormant}
        beats = "" if self._heartbeats is None else self._heartbeats.endpoint
        welcome = pb.Welcome(gateway_id=self._gateway_id, beat_s=self._settings.beat_s, beats=beats, takes_results=True)
        self._send(identity, pb.Header(welcome=welcome))
        distance = self._members.compute_distance(member)
        offers = [
            Offer(offer.block_id, offer.credits, hello.worker_id, offer.weight or 1.0, distance)
            for offer in hello.blocks
        ]
        self._owner.add_worker(member, offers, before - member.list_loaded_blocks())

    # --- internals

    def _remove(self, identity: bytes, reason: str) -> None:
        member = self._members.remove(identity, reason)
        if member is not None:
            if self._heartbeats is not None:
                self._heartbeats.silence.forget(identity)
            for asked in self._queries.values():
                self._mark_answered(asked, identity)
            self._owner.remove_worker(member, reason)

    def _mark_answered(self, answered_events: dict[bytes, asyncio.Event], identity: bytes) -> None:
        if identity in answered_events:
            answered_events[identity].set()

    def _send(self, identity: bytes, header: pb.Header) -> None:
        self._send_parts(identity, job_messages.encode(header))

    def _send_job(self, identity: bytes, message: list[Buffer]) -> None:
        if not self._send_parts(identity, message):
            asyncio.get_running_loop().call_soon(self._remove, identity, "unreachable")

    def _send_parts(self, identity: bytes, message: list[Buffer]) -> bool:
        """Send the worker's collected jobs, then this message; return whether the message could be sent."""
        member = self._members.by_key.get(identity)
        if member is not None and member.jobs_out is not None:
            member.jobs_out.flush()
        return self._socket is not None and self._socket.send(identity, message)
