"""A worker's connection to one gateway: hello, heartbeats, jobs in, results out."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

import structlog

from penstock.core.errors import EngineFailed, PenstockError, WireError, WorkerLost
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Buffer, Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.tasks.base import TaskRequest
from penstock.wire import frames
from penstock.wire.beats import WorkerHeart
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.forms import encode_statistics
from penstock.wire.sockets import DealerSocket
from penstock.worker.job import Holder, WorkerJob
from penstock.worker.recent import RecentStep, RecentSteps

log = structlog.get_logger()
now = time.monotonic
HELLO_AGAIN_S = 0.5
# By which a gateway tells them apart, of all links.
_connections = count(1)
STATISTICS_S = 5.0  # how often they are sent unasked, for the gateway to keep should this worker die


@dataclass(slots=True)
class LinkOwner:
    """What a link asks of its worker."""

    holder: Callable[[str], Holder | None]  # of a block's jobs; None: they go back
    hello: Callable[[], pb.Hello]
    statistics: Callable[[], Iterable[BlockStatistics]]
    probe: Callable[[str, Callable[[str], None]], None]  # of a block; told is what is wrong, or nothing
    wake: Callable[[str], None]  # a dormant block
    heart: WorkerHeart
    steps: RecentSteps


class GatewayLink:
    def __init__(self, endpoint: str, identity: bytes, owner: LinkOwner, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint
        self._owner = owner
        self._last_heard = now()
        self._last_statistics = 0.0
        self._unanswered_hellos = 0
        self._jobs: dict[int, tuple[WorkerJob, Holder]] = {}
        self._is_parted = False  # nobody listens here
        self.parted_at = 0.0
        self._beats = ""  # where its heart is
        self._takes_results = False
        self._socket = DealerSocket(self._on_message, identity)
        self._connection = next(_connections)
        self._socket.connect(endpoint, self._broke, keys)
        self._results = frames.FrameOutbox("results", self._socket.send)
        self.say_hello()

    def __len__(self) -> int:
        return len(self._jobs)

    def say_hello(self) -> None:
        """Tells what this worker holds now; the gateway forgets what it held before."""
        self._last_hello = now()
        self._unanswered_hellos += 1
        hello = self._owner.hello()
        hello.connection, hello.takes_jobs = self._connection, True
        self._send(pb.Frame(hello=hello))

    @property
    def is_hello_answered(self) -> bool:
        """Whether the gateway acts on the last hello: what it sent before knowing it has all arrived."""
        return self._unanswered_hellos == 0

    def beat(self, silence_s: float, memory_bytes: int, devices: Iterable[pb.DeviceUse] = ()) -> None:
        beat = pb.Beat(sent_ns=time.time_ns(), jobs=len(self._jobs), memory_bytes=memory_bytes, devices=devices)
        self._send(pb.Frame(beat=beat))
        if now() - self._last_statistics >= STATISTICS_S:
            self._last_statistics = now()
            self._send(encode_statistics(0, self._owner.statistics()))
        if self._jobs and self._silent_s() > silence_s:
            log.warning("gateway_silent", gateway=self.endpoint, jobs=len(self._jobs))
            self._abandon()

    def _silent_s(self) -> float:
        """Its loop may be busy, and so may ours have been: the hearts beat on."""
        return min(now() - self._last_heard, self._owner.heart.silences.of(self._beats))

    def hand_back(self, jobs: Iterable[WorkerJob]) -> None:
        mine = [job for job in jobs if self._jobs.pop(job.job_id, None) is not None]
        if mine:
            self._return([job.job_id for job in mine])
        for job in mine:
            self._forget_step(job)

    def part(self, reason: str) -> None:
        """From now on nothing is said or heard, until it comes back. Its socket stays: another one of this identity
        could be taken for it while its last words are on their way, and then nobody would hear either."""
        self._send(pb.Frame(bye=pb.Bye(reason=reason)))
        self._abandon()
        self._is_parted, self.parted_at = True, now()
        self._owner.heart.leave(self._beats)
        self._beats = ""

    def come_back(self) -> None:
        self._is_parted = False
        self._last_heard = now()
        self._begin_anew()

    def close(self, reason: str) -> None:
        if not self._is_parted:
            self.part(reason)
        self._socket.close(linger_ms=500)

    def _on_message(self, message: list[Buffer]) -> None:
        if self._is_parted:
            return
        self._last_heard = now()
        try:
            kind, frame = frames.decode(message)
            if kind == "jobs":
                self._on_jobs(frame.jobs.jobs)
            elif kind == "job":
                self._on_job(frame.job, frames.tensors(frame.job.inputs, message))
            else:
                self._on_frame(kind, frame)
        except WireError as error:
            log.warning("wire_error", gateway=self.endpoint, error=error.message)
            self._send_now(frames.encode_refused(error))

    def _on_frame(self, kind: str, frame: pb.Frame) -> None:
        match kind:
            case "welcome":
                self._unanswered_hellos = max(0, self._unanswered_hellos - 1)
                self._takes_results = frame.welcome.takes_results
                self._meet_heart(frame.welcome.beats)
            case "cancel":
                for job_id in frame.cancel.job_ids:
                    if (linked := self._jobs.pop(job_id, None)) is not None:
                        self._cancel(*linked)
            case "recall":
                self._on_recall(frame.recall.job_ids)
            case "more":
                linked = self._jobs.get(frame.more.job_id)
                if linked is not None and frame.more.credits:
                    job, holder = linked
                    holder.allow(job, frame.more.credits)
            case "probe":
                self._on_probe(frame.probe.probe_id, frame.probe.block_id)
            case "wake":
                self._owner.wake(frame.wake.block_id)
            case "statistics_query":
                self._send(encode_statistics(frame.statistics_query.query_id, self._owner.statistics()))
            case "refused":
                self._on_refused(frame.refused)
            case "bye":
                self._abandon()

    # --- jobs

    def _on_jobs(self, sent: Iterable[pb.Job]) -> None:
        """What is wrong with one is no fault of the others."""
        wrong: Exception | None = None
        for each in sent:
            try:
                self._on_job(each, frames.small_tensors(each.inputs))
            except Exception as error:  # noqa: BLE001 - a bug: it is raised when the others are taken
                wrong = error
        if wrong is not None:
            raise wrong

    def _on_job(self, sent: pb.Job, inputs: list[Tensor]) -> None:
        holder = self._owner.holder(sent.block_id)
        if holder is None or sent.job_id in self._jobs:
            self._return([sent.job_id])
            return
        job = self._job(sent, inputs)
        if job.session is not None and job.session.life and self._is_known(sent.block_id, job):
            return
        self._jobs[job.job_id] = (job, holder)
        holder.accept(job)

    def _on_recall(self, job_ids: Iterable[int]) -> None:
        asked = [linked for job_id in job_ids if (linked := self._jobs.get(job_id)) is not None]
        self.hand_back([job for job, holder in asked if holder.recall(job)])

    def _job(self, sent: pb.Job, inputs: list[Tensor]) -> WorkerJob:
        parameters = frames.parameters(sent.parameters) if sent.parameters else {}
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
        # What most jobs do not have; 0 stands for none.
        if sent.priority:
            job.priority = sent.priority
        if sent.queue_timeout_us:
            job.queue_deadline = at + sent.queue_timeout_us / 1e6
        if sent.response_credits:
            job.response_credits = sent.response_credits
        job.session = frames.session(sent)
        return job

    def _reply(self, job: WorkerJob, outcome: list[Tensor] | PenstockError, is_partial: bool = False) -> None:
        linked = self._jobs.get(job.job_id) if is_partial else self._jobs.pop(job.job_id, None)
        if job.session is not None and not is_partial and (step := self._owner.steps.done(job, outcome)) is not None:
            self._tell_askers(step)
        if linked is None:
            return
        if not self._takes_results:
            self._send_now(self._encode(job, outcome, job.job_id, job.attempt, is_partial))
        elif isinstance(outcome, PenstockError):
            frames.add_failure(self._results.room(0), job.job_id, job.attempt, outcome)
        elif (size_bytes := frames.size_of(outcome)) > frames.TOGETHER_BYTES:
            self._send_now(self._encode(job, outcome, job.job_id, job.attempt, is_partial))
        else:
            self._send_together(job, outcome, size_bytes, is_partial)

    def _send_together(self, job: WorkerJob, outcome: list[Tensor], size_bytes: int, is_partial: bool) -> None:
        """All answers of this turn of the loop travel in one message."""
        parameters = job.prepared.parameters if job.prepared else {}
        results = self._results.room(size_bytes)
        try:
            frames.add_result(results, job.job_id, job.attempt, outcome, job.timing, parameters, is_partial)
        except Exception as error:  # noqa: BLE001 - whatever a model gave that has no place in a message
            failure = self._unsendable(job, job.job_id, error)
            frames.add_failure(self._results.room(0), job.job_id, job.attempt, failure)

    def _encode(
        self,
        job: WorkerJob,
        outcome: list[Tensor] | PenstockError,
        job_id: int,
        attempt: int,
        is_partial: bool = False,
    ) -> list[Buffer]:
        try:
            if isinstance(outcome, PenstockError):
                return frames.encode_failure(job_id, attempt, outcome)
            parameters = job.prepared.parameters if job.prepared else {}
            return frames.encode_result(job_id, attempt, outcome, job.timing, parameters, is_partial)
        except Exception as error:  # noqa: BLE001 - whatever a model gave that has no place in a message
            return frames.encode_failure(job_id, attempt, self._unsendable(job, job_id, error))

    def _unsendable(self, job: WorkerJob, job_id: int, error: Exception) -> EngineFailed:
        log.error("answer_unsendable", error=repr(error)[:200])
        if (linked := self._jobs.pop(job_id, None)) is not None:  # of several answers: no more of them are wanted
            linked[1].cancel(job)
        return EngineFailed("the model gave an answer that cannot be sent; the server's log says why")

    def _broke(self) -> None:
        """Jobs and answers on their way are lost: neither side can know which, so both begin anew."""
        if self._is_parted:
            return
        log.warning("connection_broke", gateway=self.endpoint, jobs=len(self._jobs))
        self._abandon()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What was on its way before this hello is lost."""
        self._connection = next(_connections)
        self._unanswered_hellos = 0  # their answers are lost, too
        self.say_hello()

    def _abandon(self) -> None:
        """Nobody waits for these any more; but what has an order another gateway may ask for, and it must run once."""
        abandoned = list(self._jobs.values())
        self._jobs.clear()
        self._results.clear()
        for job, holder in abandoned:
            if job not in self._owner.steps:
                holder.cancel(job)

    # --- steps of ordered sessions

    def _is_known(self, block_id: str, job: WorkerJob) -> bool:
        """Whether the step runs or ran already; else it is noted, for those who ask again."""
        session, steps = job.session, self._owner.steps
        if session is None or session.seq_no is None or job.response_credits:
            return False
        step = steps.find(block_id, session)
        if step is None:
            if session.is_again:
                self._send_now(frames.encode_failure(job.job_id, job.attempt, _doubtful(session.seq_no)))
                return True
            steps.begin(block_id, job, now())
            return False
        if step.outcome is None:
            step.askers.append((self, job.job_id, job.attempt))
        else:
            self._tell(step, job.job_id, job.attempt)
        return True

    def _cancel(self, job: WorkerJob, holder: Holder) -> None:
        """Not where another gateway waits for it, too."""
        step = self._owner.steps.step_of(job)
        if step is None or not step.askers:
            self._owner.steps.forget(job)
            holder.cancel(job)

    def _forget_step(self, job: WorkerJob) -> None:
        """It was not started: whoever asked for the same may send it elsewhere."""
        step = self._owner.steps.forget(job) if job.session is not None else None
        for asker, job_id, _ in [] if step is None else step.askers:
            assert isinstance(asker, GatewayLink)
            asker._return([job_id])

    def _tell_askers(self, step: RecentStep) -> None:
        for asker, job_id, attempt in step.askers:
            assert isinstance(asker, GatewayLink)
            asker._tell(step, job_id, attempt)
        step.askers.clear()

    def _tell(self, step: RecentStep, job_id: int, attempt: int) -> None:
        if not self._is_parted:
            self._send_now(self._encode(step.job, step.outcome or [], job_id, attempt))

    # --- what else the gateway says

    def _meet_heart(self, endpoint: str) -> None:
        if endpoint != self._beats:
            self._owner.heart.leave(self._beats)
            self._beats = endpoint
        if endpoint:
            self._owner.heart.meet(endpoint)

    def _on_probe(self, probe_id: int, block_id: str) -> None:
        def done(problem: str) -> None:
            if not self._is_parted:
                result = pb.ProbeResult(probe_id=probe_id, block_id=block_id, problem=problem)
                self._send(pb.Frame(probe_result=result))

        self._owner.probe(block_id, done)

    def _on_refused(self, refused: pb.Refused) -> None:
        if refused.code != frames.UNKNOWN_WORKER:
            log.warning("refused", gateway=self.endpoint, code=refused.code, because=refused.message)
            return
        # The gateway is new, or took us for dead: it knows none of our jobs.
        self._abandon()
        if now() - self._last_hello > HELLO_AGAIN_S:
            log.info("hello_again", gateway=self.endpoint, because=refused.message)
            self.say_hello()

    def _return(self, job_ids: list[int]) -> None:
        if not self._is_parted:
            self._send(pb.Frame(hand_back=pb.HandBack(job_ids=job_ids)))

    def _send(self, frame: pb.Frame) -> None:
        self._send_now(frames.encode(frame))

    def _send_now(self, message: frames.Frames) -> None:
        """Behind the answers that came before it."""
        self._results.flush()
        self._socket.send(message)


def _doubtful(seq_no: int) -> WorkerLost:
    return WorkerLost(
        f"the gateway that ran seq_no {seq_no} is gone, and this model must not run a request twice: whether it ran is "
        "not known; send it again to run it now"
    )
