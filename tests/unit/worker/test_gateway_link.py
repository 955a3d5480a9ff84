"""A worker's link with a real socket at its other end: jobs that arrive, and messages that are sent back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.waiting import until
from penstock.core.errors import QueueTimeout
from penstock.core.requests import Controls, InferRequest, SessionStep
from penstock.core.statistics import BlockStatistics
from penstock.core.tensors import Tensor
from penstock.pb.v1 import job_pb2 as pb
from penstock.wire import job_messages
from penstock.wire.failures import decode_failure
from penstock.wire.heartbeats import GatewayHeartbeats, WorkerHeartbeats
from penstock.wire.sockets import RouterSocket
from penstock.wire.zmq_endpoints import Endpoint
from penstock.worker.gateway_link import GatewayLink
from penstock.worker.recent_steps import RecentSteps
from penstock.worker.worker_job import Holder, WorkerJob
from tests.heard import ReceivedMessages

TENSOR = Tensor("x", "FP32", (1, 1), b"\0\0\0\0")
LARGEST = Tensor(
    "x", "UINT8", (job_messages.MAX_COMBINED_ENTRY_BYTES,), bytes(job_messages.MAX_COMBINED_ENTRY_BYTES)
)  # sent together with others


def request_of(controls: Controls | None) -> InferRequest:
    request = InferRequest("m", [TENSOR], request_id="r")
    if controls is not None:
        request.controls = controls
    return request


class Gateway(ReceivedMessages):
    """The other end, and the worker's holder of its jobs: it records messages."""

    def __init__(self, folder: Path, at: Endpoint | None = None, steps: RecentSteps | None = None) -> None:
        super().__init__()
        self.steps = RecentSteps() if steps is None else steps
        self.router = RouterSocket(lambda identity, message: self.hear(message))
        endpoint = self.router.bind(at or Endpoint(f"ipc://{folder}/link.ipc"))
        self.jobs: list[WorkerJob] = []
        self.cancelled: list[WorkerJob] = []
        self.allowed: list[tuple[WorkerJob, int]] = []
        self.probes: list[tuple[str, Callable[[str], None]]] = []
        self.woken: list[str] = []
        self.faults: set[int] = set()  # jobs that it fails to take
        self.heartbeats = WorkerHeartbeats(b"worker", 0.05)
        self.blocks = self
        self.link = GatewayLink(endpoint, b"worker", self)

    # --- a LinkOwner

    def hello(self) -> pb.Hello:
        return pb.Hello(protocol=job_messages.PROTOCOL)

    # --- its Holders

    def holder(self, block_id: str) -> Holder | None:
        return self if block_id == "blk" else None

    def statistics(self) -> list[BlockStatistics]:
        return []

    def probe(self, block_id: str, done: Callable[[str], None]) -> None:
        self.probes.append((block_id, done))

    def wake(self, block_id: str) -> None:
        self.woken.append(block_id)

    # --- a Holder

    def accept(self, job: WorkerJob) -> None:
        if job.job_id in self.faults:
            raise ValueError("a bug")
        self.jobs.append(job)

    def cancel(self, job: WorkerJob) -> None:
        self.cancelled.append(job)

    def recall(self, job: WorkerJob) -> bool:
        return not job.has_started

    def allow(self, job: WorkerJob, credits: int) -> None:
        self.allowed.append((job, credits))

    async def send_job(self, job_id: int, controls: Controls | None = None, **fields: float) -> WorkerJob:
        count = len(self.jobs)
        self.send_message(job_messages.encode_job(job_id, 1, "blk", 9.0, request_of(controls), **fields))  # type: ignore[arg-type]
        await until(lambda: len(self.jobs) > count)
        return self.jobs[-1]

    def send(self, **kind: object) -> None:
        self.send_message(job_messages.encode(pb.Header(**kind)))  # type: ignore[arg-type]

    def send_message(self, message: job_messages.MessageParts) -> None:
        self.router.send(b"worker", message)

    def close(self) -> None:
        self.link.close("test")
        self.heartbeats.close()
        self.router.close()


@pytest.fixture
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    made = Gateway(tmp_path_factory.mktemp("l"))
    await made.get("hello")
    yield made
    made.close()


async def test_a_plain_job_has_the_first_level_and_no_limit_but_its_deadline(gateway: Gateway) -> None:
    job = await gateway.send_job(1)
    assert (job.job_id, job.attempt, job.request_id) == (1, 1, "r")
    assert (job.priority, job.queue_deadline, job.session, job.response_credits) == (1, inf, None, 0)
    assert job.deadline > time.monotonic()


async def test_a_job_has_its_level_queue_times_session_and_credits(gateway: Gateway) -> None:
    controls = Controls(priority=3, session=SessionStep("s", 4, is_end=True))
    sent = time.monotonic()
    job = await gateway.send_job(1, controls, queue_timeout_s=5.0, response_credits=8)
    assert sent + 5.0 <= job.queue_deadline <= time.monotonic() + 5.0
    assert (job.priority, job.response_credits) == (3, 8)
    assert job.session == SessionStep("s", 4, is_start=False, is_end=True)


async def test_answers_are_partial_until_the_last(gateway: Gateway) -> None:
    job = await gateway.send_job(1, response_credits=8)
    job.reply(job, [TENSOR], True)
    job.reply(job, [TENSOR], True)
    job.reply(job, [])
    job.reply(job, [TENSOR], True)  # too late: the job was answered
    kinds = []
    for _ in range(3):
        header, message = await gateway.get("result")
        kinds.append((header.result.is_partial, len(message) - 1))
    assert kinds == [(True, 1), (True, 1), (False, 0)]
    assert len(gateway.link) == 0


async def test_answers_of_one_turn_are_sent_together_and_in_order(gateway: Gateway) -> None:
    gateway.send(welcome=pb.Welcome(takes_results=True))
    one, other = await gateway.send_job(1, response_credits=8), await gateway.send_job(2, response_credits=8)
    one.reply(one, [TENSOR], True)
    other.reply(other, [TENSOR], True)
    one.reply(one, [TENSOR])
    other.reply(other, QueueTimeout("it waited too long"))
    header, message = await gateway.get("results")
    found = [(each.job_id, each.is_partial, each.failure.code, len(each.outputs)) for each in header.results.results]
    assert found == [(1, True, "", 1), (2, True, "", 1), (1, False, "", 1), (2, False, "queue_timeout", 0)]
    assert len(message) == 1
    assert job_messages.decode_small_response(header.results.results[0]).outputs == [TENSOR]
    assert len(gateway.link) == 0
    last = await gateway.send_job(3)
    last.reply(last, [TENSOR])
    gateway.link.send_heartbeat(9.0, 0)  # it does not overtake the answer
    await until(lambda: gateway.has("beat"))
    assert [kind for kind, _, _ in gateway.received if kind in ("results", "beat")] == ["results", "beat"]


async def test_answers_too_large_for_one_message_are_sent_in_several(gateway: Gateway) -> None:
    gateway.send(welcome=pb.Welcome(takes_results=True))
    jobs = [await gateway.send_job(number) for number in range(job_messages.MAX_COMBINED_ENTRIES + 20)]
    for job in jobs:
        job.reply(job, [TENSOR if job.job_id < job_messages.MAX_COMBINED_ENTRIES + 1 else LARGEST])
    counts = [len((await gateway.get("results"))[0].results.results) for _ in range(3)]
    assert counts == [job_messages.MAX_COMBINED_ENTRIES, 16, 4]


async def test_jobs_in_one_message_are_taken_in_order(gateway: Gateway) -> None:
    gateway.link.say_hello()
    assert (await gateway.get("hello"))[0].hello.takes_jobs
    header = pb.Header()
    for number, block_id in enumerate(("blk", "blk-other", "blk", "blk")):
        controls = Controls(priority=number + 1)
        job_messages.add_job(header.jobs.jobs, min(number, 2), 1, block_id, 9.0, request_of(controls), 5.0, number)
    gateway.send_message(job_messages.encode(header))
    handed_back = [(await gateway.get("hand_back"))[0].hand_back.job_ids[0] for _ in range(2)]
    assert handed_back == [1, 2]  # a block that is not held; a job that is known
    assert [(job.job_id, job.priority, job.response_credits) for job in gateway.jobs] == [(0, 1, 0), (2, 3, 2)]
    assert all(job.request.inputs == [TENSOR] and job.queue_deadline < inf for job in gateway.jobs)


async def test_a_bug_with_one_job_does_not_affect_the_others(gateway: Gateway) -> None:
    raised: list[BaseException | None] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: raised.append(what.get("exception")))
    gateway.faults = {1}
    header = pb.Header()
    for number in range(3):
        job_messages.add_job(header.jobs.jobs, number, 1, "blk", 9.0, request_of(None))
    gateway.send_message(job_messages.encode(header))
    await until(lambda: len(gateway.jobs) == 2)
    assert [job.job_id for job in gateway.jobs] == [0, 2]
    await until(lambda: len(raised) == 1)


async def test_a_large_answer_is_sent_after_the_small_ones_before_it(gateway: Gateway) -> None:
    gateway.send(welcome=pb.Welcome(takes_results=True))
    job = await gateway.send_job(1, response_credits=8)
    job.reply(job, [TENSOR], True)
    job.reply(job, [Tensor("x", "UINT8", (100_000,), bytes(100_000))], True)
    job.reply(job, [Tensor("y", "FP32", (2**80,), b"")], True)
    await gateway.get("results")
    await gateway.get("result")
    failed = (await gateway.get("results"))[0].results.results[0]
    assert decode_failure(failed.failure).code == "engine_failed"
    assert gateway.cancelled == [job]


async def test_a_failure_is_sent_with_its_code(gateway: Gateway) -> None:
    job = await gateway.send_job(1)
    job.reply(job, QueueTimeout("it waited too long"))
    header, _ = await gateway.get("result")
    assert isinstance(decode_failure(header.result.failure), QueueTimeout)


@pytest.mark.parametrize("is_partial", [False, True])
async def test_an_answer_that_cannot_be_sent_fails_its_own_job(gateway: Gateway, is_partial: bool) -> None:
    job = await gateway.send_job(1)
    job.reply(job, [Tensor("y", "FP32", (2**80,), b"")], is_partial)
    result = (await gateway.get("result"))[0].result
    assert (result.job_id, decode_failure(result.failure).code) == (1, "engine_failed")
    assert gateway.cancelled == ([job] if is_partial else [])
    job.reply(job, [TENSOR])  # no caller waits for it any more
    other = await gateway.send_job(2)
    other.reply(other, [TENSOR])
    assert (await gateway.get("result"))[0].result.job_id == 2


async def test_more_and_cancel_are_passed_to_the_holder_of_the_job(gateway: Gateway) -> None:
    job = await gateway.send_job(1, response_credits=1)
    gateway.send(more=pb.More(job_id=1, credits=4))
    gateway.send(more=pb.More(job_id=1))
    gateway.send(more=pb.More(job_id=99, credits=4))
    gateway.send(cancel=pb.Cancel(job_ids=[1, 99]))
    await until(lambda: bool(gateway.cancelled))
    assert (gateway.allowed, gateway.cancelled) == ([(job, 4)], [job])
    job.reply(job, [TENSOR])  # no caller waits for it
    gateway.send(statistics_query=pb.StatisticsQuery(query_id=5))
    await gateway.get("statistics")
    assert all(kind != "result" for kind, _, _ in gateway.received)


async def test_a_probe_is_answered_when_its_block_is_done(gateway: Gateway) -> None:
    gateway.send(probe=pb.Probe(probe_id=7, block_id="blk"))
    await until(lambda: bool(gateway.probes))
    block_id, done = gateway.probes[0]
    assert block_id == "blk"
    done("it hangs")
    header, _ = await gateway.get("probe_result")
    result = header.probe_result
    assert (result.probe_id, result.block_id, result.problem) == (7, "blk", "it hangs")


async def test_a_probe_answered_after_the_link_closed_is_dropped(gateway: Gateway) -> None:
    gateway.send(probe=pb.Probe(probe_id=7, block_id="blk"))
    await until(lambda: bool(gateway.probes))
    gateway.link.close("the worker stops")
    gateway.probes[0][1]("")


async def test_a_wake_is_passed_to_the_worker(gateway: Gateway) -> None:
    gateway.send(wake=pb.Wake(block_id="blk"))
    await until(lambda: gateway.woken == ["blk"])


async def test_a_recall_hands_back_jobs_that_have_not_started(gateway: Gateway) -> None:
    (await gateway.send_job(1)).has_started = True
    await gateway.send_job(2)
    gateway.send(recall=pb.Recall(job_ids=[1, 2, 99]))
    header, _ = await gateway.get("hand_back")
    assert list(header.hand_back.job_ids) == [2]
    assert len(gateway.link) == 1


async def test_jobs_of_an_absent_block_are_handed_back(gateway: Gateway) -> None:
    request = InferRequest("m", [TENSOR])
    gateway.router.send(b"worker", job_messages.encode_job(3, 1, "blk-other", 9.0, request))
    header, _ = await gateway.get("hand_back")
    assert list(header.hand_back.job_ids) == [3]


async def test_a_gateway_with_a_busy_loop_keeps_its_jobs_and_a_dead_one_does_not(
    gateway: Gateway, tmp_path: Path
) -> None:
    job = await gateway.send_job(1)
    heartbeats = GatewayHeartbeats(Endpoint(f"ipc://{tmp_path}/h.ipc"), 0.05)
    gateway.send(welcome=pb.Welcome(beats=heartbeats.endpoint))
    await until(lambda: gateway.heartbeats.silence.seconds(heartbeats.endpoint) < inf)
    await asyncio.sleep(0.5)
    gateway.link.send_heartbeat(silence_s=0.4, memory_bytes=0)
    assert gateway.cancelled == []
    heartbeats.close()
    await until(lambda: gateway.heartbeats.silence.seconds(heartbeats.endpoint) > 0.4)
    gateway.link.send_heartbeat(silence_s=0.4, memory_bytes=0)
    assert gateway.cancelled == [job]


async def test_only_a_worker_unknown_to_the_gateway_drops_its_jobs(gateway: Gateway) -> None:
    job = await gateway.send_job(1)
    gateway.send(refused=pb.Refused(code="wire_error", message="what was that?"))
    gateway.send(wake=pb.Wake(block_id="heard"))
    await until(lambda: gateway.woken == ["heard"])
    assert gateway.cancelled == []
    gateway.send(refused=pb.Refused(code=job_messages.UNKNOWN_WORKER, message="say hello first"))
    await until(lambda: gateway.cancelled == [job])


async def test_messages_on_a_broken_connection_are_given_up_on_both_sides() -> None:
    gateway = Gateway(Path("unused"), Endpoint("tcp://127.0.0.1:0"))
    first, _ = await gateway.get("hello")
    job = await gateway.send_job(1)
    endpoint = Endpoint(gateway.link.endpoint)
    gateway.router.close()
    await until(lambda: gateway.cancelled == [job])
    gateway.router = RouterSocket(lambda identity, message: gateway.hear(message))
    gateway.router.bind(endpoint)
    second, _ = await gateway.get("hello")
    assert second.hello.connection != first.hello.connection
    gateway.close()


async def test_a_disconnected_link_receives_nothing_and_reconnects(gateway: Gateway) -> None:
    job = await gateway.send_job(1)
    first = gateway.link._connection
    gateway.link.suspend("no longer listed")
    await gateway.get("bye")
    assert gateway.cancelled == [job]
    gateway.send_message(job_messages.encode_job(2, 1, "blk", 9.0, request_of(None)))
    await asyncio.sleep(0.05)
    gateway.link.resume()
    header, _ = await gateway.get("hello")
    assert header.hello.connection != first
    again = await gateway.send_job(3)
    assert [each.job_id for each in gateway.jobs] == [1, 3]
    assert again.job_id == 3


def ordered(seq_no: int = 1, **more: Any) -> Controls:
    return Controls(session=SessionStep("s", seq_no, life=7, **more))


async def test_a_step_requested_again_by_another_gateway_runs_once(
    gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Gateway(tmp_path_factory.mktemp("m"), steps=gateway.steps)
    try:
        await other.get("hello")
        job = await gateway.send_job(1, ordered())
        other.send_message(job_messages.encode_job(9, 1, "blk", 9.0, request_of(ordered())))
        gateway.send(bye=pb.Bye(reason="killed"))
        gateway.send(wake=pb.Wake(block_id="heard"))
        await until(lambda: gateway.woken == ["heard"])
        await until(lambda: bool(gateway.steps.find("blk", SessionStep("s", 1, life=7)).waiting_links))  # type: ignore[union-attr]
        assert (gateway.cancelled, other.jobs) == ([], [])
        job.reply(job, [TENSOR])
        assert (await other.get("result"))[0].result.job_id == 9
        other.send_message(job_messages.encode_job(10, 2, "blk", 9.0, request_of(ordered())))
        assert (await other.get("result"))[0].result.job_id == 10
        assert other.jobs == []
    finally:
        other.close()


async def test_a_job_that_must_not_run_twice_is_answered_or_refused(gateway: Gateway) -> None:
    gateway.send_message(job_messages.encode_job(1, 1, "blk", 9.0, request_of(ordered(is_again=True))))
    failure = decode_failure((await gateway.get("result"))[0].result.failure)
    assert failure.code == "worker_lost"
    assert gateway.jobs == []
    job = await gateway.send_job(2, ordered())
    gateway.send(cancel=pb.Cancel(job_ids=[2]))
    await until(lambda: gateway.cancelled == [job])
    assert len(gateway.steps) == 0
