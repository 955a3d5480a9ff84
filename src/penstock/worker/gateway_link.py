"""A worker's connection to one gateway: receives jobs; sends results, heartbeats and the list of its blocks (hello)."""

import time
from collections.abc import Iterable
from itertools import count
from typing import Protocol

import structlog

from penstock.core.errors import EngineFailed, PenstockError, WireError, WorkerLost
from penstock.core.tensors import Buffer, Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.tasks.base import TaskRequest
from penstock.wire import job_messages
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.encodings import encode_statistics
from penstock.wire.heartbeats import WorkerHeartbeats
from penstock.wire.sockets import DealerSocket
from penstock.worker.recent_steps import RecentStep, RecentSteps
from penstock.worker.worker_job import Holder, Holders, WorkerJob

log = structlog.get_logger()
now = time.monotonic
HELLO_AGAIN_S = 0.5  # shortest time between two hello messages if the gateway refuses messages
# Gateways distinguish connections by this number, which is unique among all links.
_connections = count(1)
STATISTICS_S = 5.0  # interval of sending statistics, so that the gateway has recent ones if this worker dies


class LinkOwner(Protocol):
    """The methods that a `GatewayLink` calls on its worker."""

    @property
    def blocks(self) -> Holders: ...

    @property
    def heartbeats(self) -> WorkerHeartbeats: ...

    @property
    def steps(self) -> RecentSteps: ...

    def hello(self) -> pb.Hello: ...


class GatewayLink:
    """Receives jobs from one gateway, and sends their results."""

    def __init__(self, endpoint: str, identity: bytes, owner: LinkOwner, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint
        self._owner = owner
        self._blocks, self._heartbeats, self._steps = owner.blocks, owner.heartbeats, owner.steps
        self._last_received = now()
        self._last_statistics = 0.0
        self._unanswered_hellos = 0
        self._jobs: dict[int, tuple[WorkerJob, Holder]] = {}
        self._is_suspended = False  # messages are neither sent nor processed
        self._has_left = False  # the gateway has announced its end
        self.suspended_at = 0.0
        self._heartbeat_endpoint = ""  # the endpoint of the gateway's heartbeats
        self._takes_results = False
        self._socket = DealerSocket(self._on_message, identity)
        self._results = job_messages.MessageOutbox("results", self._socket.send)
        self._connection = next(_connections)
        self._socket.connect(endpoint, self._on_connection_lost, keys)
        self.say_hello()

    def __len__(self) -> int:
        return len(self._jobs)

    def say_hello(self) -> None:
        """Send the gateway the list of the worker's current blocks, which replaces any earlier list."""
        self._last_hello = now()
        self._unanswered_hellos += 1
        hello = self._owner.hello()
        hello.connection, hello.takes_jobs = self._connection, True
        self._send_header(pb.Header(hello=hello))

    @property
    def is_hello_answered(self) -> bool:
        """True if the gateway has answered the last hello, and so has received everything sent before it."""
        return self._unanswered_hellos == 0

    def is_alive(self, silence_s: float) -> bool:
        """Return whether the gateway sent a message in the last `silence_s` seconds and has not said goodbye."""
        return not self._has_left and self._measure_silence_s() <= silence_s

    def send_heartbeat(self, silence_s: float, memory_bytes: int, devices: Iterable[pb.DeviceUse] = ()) -> None:
        beat = pb.Beat(sent_ns=time.time_ns(), jobs=len(self._jobs), memory_bytes=memory_bytes, devices=devices)
        self._send_header(pb.Header(beat=beat))
        if now() - self._last_statistics >= STATISTICS_S:
            self._last_statistics = now()
            self._send_header(encode_statistics(0, self._blocks.statistics()))
        if self._jobs and self._measure_silence_s() > silence_s:
            log.warning("gateway_went_silent", gateway=self.endpoint, jobs=len(self._jobs))
            self._cancel_jobs()

    def _measure_silence_s(self) -> float:
        """Return the seconds since the gateway's last message or heartbeat.

        A busy event loop of the gateway delays its messages, but not its heartbeats.
        """
        return min(now() - self._last_received, self._heartbeats.silence.seconds(self._heartbeat_endpoint))

    def hand_back(self, jobs: Iterable[WorkerJob]) -> None:
        mine = [job for job in jobs if self._jobs.pop(job.job_id, None) is not None]
        if mine:
            self._return_jobs([job.job_id for job in mine])
        for job in mine:
            self._forget_step(job)

    def suspend(self, reason: str) -> None:
        """Stop sending and processing messages until `resume`.

        The socket stays open, because a new socket with the same identity would be dangerous while the last messages
        are on their way: the gateway could confuse the two sockets, and neither would receive anything.
        """
        self._send_header(pb.Header(bye=pb.Bye(reason=reason)))
        self._cancel_jobs()
        self._is_suspended, self.suspended_at = True, now()
        self._heartbeats.remove_gateway(self._heartbeat_endpoint)
        self._heartbeat_endpoint = ""

    def resume(self) -> None:
        self._is_suspended = False
        self._last_received = now()
        self._start_connection()

    def close(self, reason: str) -> None:
        if not self._is_suspended:
            self.suspend(reason)
        self._socket.close(linger_ms=500)

    def _on_message(self, message: list[Buffer]) -> None:
        if self._is_suspended:
            return
        self._last_received = now()
        try:
            kind, header = job_messages.decode(message)
            if kind == "jobs":
                self._on_jobs(header.jobs.jobs)
            elif kind == "job":
                self._on_job(header.job, job_messages.decode_tensors(header.job.inputs, message))
            else:
                self._process_message(kind, header)
        except WireError as error:
            log.warning("wire_error", gateway=self.endpoint, error=error.message)
            self._send_message(job_messages.encode_refused(error))

    def _process_message(self, kind: str, header: pb.Header) -> None:
        match kind:
            case "welcome":
                self._has_left = False
                self._unanswered_hellos = max(0, self._unanswered_hellos - 1)
                self._takes_results = header.welcome.takes_results
                self._set_heartbeat_endpoint(header.welcome.beats)
            case "cancel":
                for job_id in header.cancel.job_ids:
                    if (linked := self._jobs.pop(job_id, None)) is not None:
                        self._cancel_unless_shared(*linked)
            case "recall":
                self._on_recall(header.recall.job_ids)
            case "more":
                linked = self._jobs.get(header.more.job_id)
                if linked is not None and header.more.credits:
                    job, holder = linked
                    holder.allow(job, header.more.credits)
            case "probe":
                self._on_probe(header.probe.probe_id, header.probe.block_id)
            case "wake":
                self._blocks.wake(header.wake.block_id)
            case "statistics_query":
                self._send_header(encode_statistics(header.statistics_query.query_id, self._blocks.statistics()))
            case "refused":
                self._on_refused(header.refused)
            case "bye":
                self._has_left = True
                self._cancel_jobs()

    # --- jobs

    def _on_jobs(self, sent: Iterable[pb.Job]) -> None:
        """Process the jobs of one message; an exception in one job does not affect the others."""
        wrong: Exception | None = None
        for each in sent:
            try:
                self._on_job(each, job_messages.decode_small_tensors(each.inputs))
            except Exception as error:  # noqa: BLE001 - a bug, which is raised after the other jobs are processed
                wrong = error
        if wrong is not None:
            raise wrong

    def _on_job(self, sent: pb.Job, inputs: list[Tensor]) -> None:
        holder = self._blocks.holder(sent.block_id)
        if holder is None or sent.job_id in self._jobs:
            self._return_jobs([sent.job_id])
            return
        job = self._build_job(sent, inputs)
        if job.session is not None and job.session.life and self._join_known_step(sent.block_id, job):
            return
        self._jobs[job.job_id] = (job, holder)
        holder.accept(job)

    def _on_recall(self, job_ids: Iterable[int]) -> None:
        asked = [linked for job_id in job_ids if (linked := self._jobs.get(job_id)) is not None]
        self.hand_back([job for job, holder in asked if holder.recall(job)])

    def _build_job(self, sent: pb.Job, inputs: list[Tensor]) -> WorkerJob:
        parameters = job_messages.decode_parameters(sent.parameters) if sent.parameters else {}
        request = TaskRequest(inputs, sent.outputs[:], parameters)
        at = now()
        job = WorkerJob(
            sent.job_id,
            sent.attempt,
            request,
            at + sent.timeout_us / 1e6,
            self._reply,
            sent.request_id,
            sent.traceparent,
        )
        # Most jobs have none of these: 0 means that the field is not set.
        if sent.priority:
            job.priority = sent.priority
        if sent.queue_timeout_us:
            job.queue_deadline = at + sent.queue_timeout_us / 1e6
        if sent.response_credits:
            job.response_credits = sent.response_credits
        job.session = job_messages.decode_session(sent)
        return job

    def _reply(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        linked = self._jobs.get(job.job_id) if is_partial else self._jobs.pop(job.job_id, None)
        if job.session is not None and not is_partial and (step := self._steps.finish(job, outcome)) is not None:
            self._answer_waiting_links(step)
        if linked is None:
            return
        if not self._takes_results:
            self._send_message(self._encode_outcome(job, outcome, job.job_id, job.attempt, is_partial))
        elif isinstance(outcome, PenstockError):
            job_messages.add_failure(self._results.list_for(0), job.job_id, job.attempt, outcome)
        elif (size_bytes := job_messages.count_bytes(outcome)) > job_messages.MAX_COMBINED_ENTRY_BYTES:
            self._send_message(self._encode_outcome(job, outcome, job.job_id, job.attempt, is_partial))
        else:
            self._add_to_results(job, outcome, size_bytes, is_partial)

    def _add_to_results(self, job: WorkerJob, outcome: list[Tensor], size_bytes: int, is_partial: bool) -> None:
        """Add the answer to the message that collects all answers of this iteration of the event loop."""
        parameters = job.prepared.parameters if job.prepared else {}
        results = self._results.list_for(size_bytes)
        try:
            job_messages.add_result(results, job.job_id, job.attempt, outcome, job.timing, parameters, is_partial)
        except Exception as error:  # noqa: BLE001 - the model's answer does not fit into a message
            failure = self._reject_unsendable_answer(job, job.job_id, error)
            job_messages.add_failure(self._results.list_for(0), job.job_id, job.attempt, failure)

    def _encode_outcome(
        self,
        job: WorkerJob,
        outcome: list[Tensor] | PenstockError,
        job_id: int,
        attempt: int,
        is_partial: bool = False,
    ) -> list[Buffer]:
        try:
            if isinstance(outcome, PenstockError):
                return job_messages.encode_failure(job_id, attempt, outcome)
            parameters = job.prepared.parameters if job.prepared else {}
            return job_messages.encode_result(job_id, attempt, outcome, job.timing, parameters, is_partial)
        except Exception as error:  # noqa: BLE001 - the model's answer does not fit into a message
            return job_messages.encode_failure(job_id, attempt, self._reject_unsendable_answer(job, job_id, error))

    def _reject_unsendable_answer(self, job: WorkerJob, job_id: int, error: Exception) -> EngineFailed:
        log.error("answer_not_sent", error=repr(error)[:200])
        if (linked := self._jobs.pop(job_id, None)) is not None:  # the job sends several answers: cancel the next ones
            linked[1].cancel(job)
        return EngineFailed("the model's answer cannot be sent; see answer_not_sent in the server's log")

    def _on_connection_lost(self) -> None:
        """Start a new connection: messages were lost, and neither side knows which jobs or answers they contained."""
        if self._is_suspended:
            return
        log.warning("connection_lost", gateway=self.endpoint, jobs=len(self._jobs))
        self._cancel_jobs()
        self._start_connection()

    def _start_connection(self) -> None:
        """Send a hello with a new connection number; the gateway then ignores messages with the old number."""
        self._connection = next(_connections)
        self._unanswered_hellos = 0  # the answers to earlier hellos are lost as well
        self.say_hello()

    def _cancel_jobs(self) -> None:
        """Cancel all jobs except steps of ordered sessions.

        A step may run only once, so it continues: another gateway may request its outcome later.
        """
        abandoned = list(self._jobs.values())
        self._jobs.clear()
        self._results.clear()
        for job, holder in abandoned:
            if job not in self._steps:
                holder.cancel(job)

    # --- steps of ordered sessions

    def _join_known_step(self, block_id: str, job: WorkerJob) -> bool:
        """Return True if the job's session step is running or has run; its outcome is then sent for this job.

        Otherwise, record that this job runs the step, and return False.
        """
        session, steps = job.session, self._steps
        if session is None or session.seq_no is None or job.response_credits:
            return False
        step = steps.find(block_id, session)
        if step is None:
            if session.is_again:
                self._send_message(
                    job_messages.encode_failure(job.job_id, job.attempt, _unknown_outcome_error(session.seq_no))
                )
                return True
            steps.begin(block_id, job, now())
            return False
        if step.outcome is None:
            step.waiting_links.append((self, job.job_id, job.attempt))
        else:
            self._send_step_outcome(step, job.job_id, job.attempt)
        return True

    def _cancel_unless_shared(self, job: WorkerJob, holder: Holder) -> None:
        """Cancel the job, unless another gateway also waits for the job's step."""
        step = self._steps.find_by_job(job)
        if step is None or not step.waiting_links:
            self._steps.remove(job)
            holder.cancel(job)

    def _forget_step(self, job: WorkerJob) -> None:
        """Forget the session step of a job that has not started; return the jobs of all gateways that wait for it."""
        step = self._steps.remove(job) if job.session is not None else None
        for asker, job_id, _ in [] if step is None else step.waiting_links:
            assert isinstance(asker, GatewayLink)
            asker._return_jobs([job_id])

    def _answer_waiting_links(self, step: RecentStep) -> None:
        for asker, job_id, attempt in step.waiting_links:
            assert isinstance(asker, GatewayLink)
            asker._send_step_outcome(step, job_id, attempt)
        step.waiting_links.clear()

    def _send_step_outcome(self, step: RecentStep, job_id: int, attempt: int) -> None:
        if not self._is_suspended:
            self._send_message(self._encode_outcome(step.job, step.outcome or [], job_id, attempt))

    # --- other messages of the gateway

    def _set_heartbeat_endpoint(self, endpoint: str) -> None:
        if endpoint != self._heartbeat_endpoint:
            self._heartbeats.remove_gateway(self._heartbeat_endpoint)
            self._heartbeat_endpoint = endpoint
        if endpoint:
            self._heartbeats.add_gateway(endpoint)

    def _on_probe(self, probe_id: int, block_id: str) -> None:
        def send_result(problem: str) -> None:
            if not self._is_suspended:
                result = pb.ProbeResult(probe_id=probe_id, block_id=block_id, problem=problem)
                self._send_header(pb.Header(probe_result=result))

        self._blocks.probe(block_id, send_result)

    def _on_refused(self, refused: pb.Refused) -> None:
        if refused.code != job_messages.UNKNOWN_WORKER:
            log.warning("message_refused", gateway=self.endpoint, code=refused.code, because=refused.message)
            return
        # The gateway has restarted or has declared this worker dead, so it knows none of the worker's jobs.
        self._cancel_jobs()
        if now() - self._last_hello > HELLO_AGAIN_S:
            log.info("hello_repeated", gateway=self.endpoint, because=refused.message)
            self.say_hello()

    def _return_jobs(self, job_ids: list[int]) -> None:
        if not self._is_suspended:
            self._send_header(pb.Header(hand_back=pb.HandBack(job_ids=job_ids)))

    def _send_header(self, header: pb.Header) -> None:
        self._send_message(job_messages.encode(header))

    def _send_message(self, message: job_messages.MessageParts) -> None:
        """Send the answers collected so far, and then the message."""
        self._results.flush()
        self._socket.send(message)


def _unknown_outcome_error(seq_no: int) -> WorkerLost:
    return WorkerLost(
        f"the gateway that ran seq_no {seq_no} is gone: it is unknown whether the request ran, and this model must not "
        "run a request twice; send the request again to run it now"
    )
