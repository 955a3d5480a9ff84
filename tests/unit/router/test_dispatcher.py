"""The dispatcher and the jobs it sends to workers over real sockets: their answers, ends and deadlines."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.waiting import until
from penstock.core.blocks import BlockDescription
from penstock.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidTensor,
    ModelNotReady,
    PenstockError,
    QueueFull,
    QueueTimeout,
    WorkerLost,
)
from penstock.core.requests import Controls, InferRequest, InferResponse, SessionStep, Timing
from penstock.pb.v1 import job_pb2 as pb
from penstock.router.answers import AnswerStream
from penstock.wire import job_messages
from tests.unit.router.peers import ANSWER, TENSOR, Bed, Peer, block, offer, request

AHEAD = 8  # answers of a stream that may be in flight


async def test_a_job_is_sent_and_its_result_returned(bed: Bed) -> None:
    worker = await bed.worker()
    asked = InferRequest("m", [TENSOR], "1", "r", ["y"], {"k": 3}, traceparent="00-t")
    answer = bed.ask(asked=asked)
    header, message = await worker.get("job")
    job = header.job
    assert (job.block_id, job.attempt, job.request_id, job.traceparent) == ("blk", 1, "r", "00-t")
    assert (list(job.outputs), job_messages.decode_parameters(job.parameters), job.response_credits) == (
        ["y"],
        {"k": 3},
        0,
    )
    assert [bytes(tensor.data) for tensor in job_messages.decode_tensors(job.inputs, message)] == [TENSOR.data]
    assert 0 < job.timeout_us <= 60_000_000
    assert (job.priority, job.queue_timeout_us, job.HasField("session")) == (0, 0, False)
    assert bed.dispatcher.count_jobs() == 1
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (0, 1)}
    worker.answer(job)
    response = await answer
    assert response == InferResponse("m", "1", "r", response.outputs, Timing(1, 2, 3, 4, 5), {"p": 7}, is_final=True)
    assert [(found.name, bytes(found.data)) for found in response.outputs] == [("y", ANSWER.data)]
    assert bed.dispatcher.count_jobs() == 0
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (0, 0)}


async def test_a_job_contains_the_requests_controls(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(priorities={"levels": 3})))
    asked = request()
    step = SessionStep("s", 4, is_end=True)
    asked.controls = Controls(2, 50.0, step)
    answer = bed.ask(block(priorities={"levels": 3}), asked=asked)
    job = await worker.get_job()
    assert (job.priority, job_messages.decode_session(job)) == (2, SessionStep("s", 4, is_end=True))
    assert 0 < job.queue_timeout_us <= 50_000_000
    assert step.home == b""
    worker.answer(job)
    await answer
    assert step.home == b"a"


async def test_job_ids_increase_over_restarts_of_a_gateway(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(), 2))
    bed.ask()
    bed.ask()
    first, second = await worker.get_job(), await worker.get_job()
    assert second.job_id == first.job_id + 1
    assert first.job_id > 1 << 60


async def test_a_job_that_cannot_be_sent_fails_alone_and_its_credit_is_reused(bed: Bed) -> None:
    worker = await bed.worker()
    never = InferRequest("m", [TENSOR], "1", "r", parameters={"k": 2**64})
    assert [await outcome(bed.ask(asked=never)) for _ in range(5)] == ["internal"] * 5
    running = bed.ask()  # takes the only credit
    job = await worker.get_job()
    unsent = [bed.ask(asked=never) for _ in range(1000)]
    last = bed.ask()
    worker.answer(job)
    await running
    assert {await outcome(each) for each in unsent} == {"internal"}
    worker.answer(await worker.get_job())
    await last
    assert bed.dispatcher.count_jobs() == 0


async def test_a_failed_request_is_freed_at_once(bed: Bed) -> None:
    """The request is freed at once, not when the garbage collector runs many large requests later."""
    await bed.worker()
    never = InferRequest("m", [TENSOR], "1", "r", parameters={"k": 2**64})
    gc.disable()
    try:
        with contextlib.suppress(PenstockError):
            await bed.dispatcher.run(block(), never, asyncio.get_running_loop().time() + 60)
        assert sys.getrefcount(never) == 2
    finally:
        gc.enable()


async def test_the_ticker_continues_after_exceptions(bed: Bed) -> None:
    await bed.worker()

    def fail(at: float) -> None:
        raise RuntimeError("a bug")

    bed.dispatcher.add(SimpleNamespace(tick=fail, close=lambda: None))
    with pytest.raises(DeadlineExceeded):
        await bed.ask(timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        await bed.ask(timeout_s=0.1)


async def outcome(asked: asyncio.Task[InferResponse]) -> str:
    try:
        await asked
    except PenstockError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize("error", [EngineFailed("it broke"), InvalidTensor("x is no good", tensor="x")])
async def test_a_failure_is_raised_with_its_code_and_fields(bed: Bed, error: PenstockError) -> None:
    worker = await bed.worker()
    answer = bed.ask()
    job = await worker.get_job()
    worker.send_raw(job_messages.encode_failure(job.job_id, job.attempt, error))
    with pytest.raises(type(error)) as raised:
        await answer
    assert (raised.value.message, raised.value.fields) == (error.message, error.fields)
    assert bed.dispatcher.count_jobs() == 0


async def test_a_job_waits_for_a_credit_and_takes_the_next_free_one(bed: Bed) -> None:
    worker = await bed.worker()
    first, second = bed.ask(), bed.ask()
    job = await worker.get_job()
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (1, 1)}
    worker.answer(job)
    worker.answer(await worker.get_job())
    assert [(await answer).request_id for answer in (first, second)] == ["r", "r"]


async def test_a_full_queue_refuses_at_once(bed: Bed) -> None:
    full = block(batching={"max_queue": 1})
    await bed.worker("a", offer(full))
    bed.ask(full)
    bed.ask(full)
    with pytest.raises(QueueFull):
        await bed.ask(full)
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (1, 1)}


async def test_a_duplicate_result_or_one_of_another_attempt_is_counted_and_dropped(bed: Bed) -> None:
    worker = await bed.worker()
    answer = bed.ask()
    job = await worker.get_job()
    job.attempt += 1
    worker.answer(job)
    await bed.until_counted("late_replies", 1)
    assert not answer.done()
    job.attempt -= 1
    worker.answer(job)
    worker.answer(job)
    await answer
    await bed.until_counted("late_replies", 2)
    worker.answer(job, is_partial=True)
    await bed.until_counted("late_replies", 3)
    assert bed.counted("wire_errors") == 0


async def test_a_leaving_callers_job_is_cancelled_on_the_worker(bed: Bed) -> None:
    worker = await bed.worker()
    answer = bed.ask()
    job = await worker.get_job()
    answer.cancel()
    header, _ = await worker.get("cancel")
    assert list(header.cancel.job_ids) == [job.job_id]
    assert answer.cancelled()
    assert bed.dispatcher.count_jobs() == 0
    worker.answer(job)
    await bed.until_counted("late_replies")


async def test_a_leaving_callers_waiting_job_is_dropped_silently(bed: Bed) -> None:
    worker = await bed.worker()
    first, second, third = bed.ask(), bed.ask(), bed.ask(asked=request("third"))
    job = await worker.get_job()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (1, 1)}
    worker.answer(job)
    job = await worker.get_job()
    assert job.request_id == "third"
    assert not worker.has("cancel")
    worker.answer(job)
    await asyncio.gather(first, third)


async def test_a_cancelled_jobs_credit_is_reused(bed: Bed) -> None:
    worker = await bed.worker()
    first, _ = bed.ask(), bed.ask(asked=request("second"))
    await worker.get_job()
    first.cancel()
    await worker.get("cancel")
    assert (await worker.get_job()).request_id == "second"


async def test_a_job_that_is_handed_back_runs_elsewhere_without_using_an_attempt(bed: Bed) -> None:
    first = await bed.worker("a")
    answer = bed.ask()
    job = await first.get_job()
    second = await bed.worker("b")
    first.say_hello()  # it no longer offers the block
    first.send(hand_back={"job_ids": [job.job_id, 99]})
    again = await second.get_job()
    assert (again.job_id, again.attempt) == (job.job_id, 2)
    assert bed.counted("retries", reason="handed_back") == 1
    first.answer(job)  # too late
    await bed.until_counted("late_replies")
    second.answer(again)
    await answer


async def test_a_deadline_passes_while_a_job_runs(bed: Bed) -> None:
    worker = await bed.worker()
    answer = bed.ask(timeout_s=0.05)
    job = await worker.get_job()
    with pytest.raises(DeadlineExceeded, match="while the request was running"):
        await answer
    header, _ = await worker.get("cancel")
    assert list(header.cancel.job_ids) == [job.job_id]


async def test_a_deadline_passes_while_a_job_waits(bed: Bed) -> None:
    worker = await bed.worker()
    bed.ask()
    await worker.get_job()
    with pytest.raises(DeadlineExceeded, match="while the request was waiting"):
        await bed.ask(timeout_s=0.05)
    assert bed.dispatcher.count_jobs_by_block() == {"blk": (0, 1)}
    assert not worker.has("cancel")


async def test_a_job_may_wait_no_longer_than_its_queue_timeout(bed: Bed) -> None:
    worker = await bed.worker()
    bed.ask()
    await worker.get_job()
    asked = request()
    asked.controls = Controls(queue_timeout_s=0.05)
    with pytest.raises(QueueTimeout):
        await bed.ask(asked=asked)


async def test_a_retired_block_fails_what_waits_for_it(bed: Bed) -> None:
    worker = await bed.worker()
    running, waiting = bed.ask(), bed.ask()
    job = await worker.get_job()
    bed.dispatcher.retire_blocks({"blk": ModelNotReady("it is gone")})
    worker.say_hello()
    with pytest.raises(ModelNotReady, match="it is gone"):
        await waiting
    worker.answer(job)
    await running


async def test_a_block_has_no_fingerprint_while_workers_hold_different_files(bed: Bed) -> None:
    old, new = replace(block(), fingerprint="old"), replace(block(), fingerprint="new")
    first = await bed.worker("a", offer(old))
    await bed.worker("b", offer(old))
    assert bed.dispatcher.list_descriptions()["blk"].fingerprint == "old"
    await first.join(offer(new))
    assert bed.dispatcher.list_descriptions()["blk"].fingerprint == ""


# --- streams


def follow(bed: Bed, described: BlockDescription) -> AsyncGenerator[InferResponse, None]:
    answers, asked = AnswerStream(), request()
    asked.answers = answers
    return answers.follow(bed.dispatcher.run(described, asked, later()))


async def begin(
    bed: Bed, worker: Peer
) -> tuple[AsyncGenerator[InferResponse, None], asyncio.Future[InferResponse], pb.Job]:
    """Start a stream whose caller waits for the first answer; return both and the worker's job."""
    stream = follow(bed, block())
    first = asyncio.ensure_future(anext(stream))
    return stream, first, await worker.get_job()


async def test_a_stream_returns_answers_in_order_and_requests_more_as_they_are_taken(bed: Bed) -> None:
    worker = await bed.worker()
    stream, first, job = await begin(bed, worker)
    assert job.response_credits == AHEAD
    for _ in range(AHEAD):
        worker.answer(job, is_partial=True)
    assert [(found.is_final, len(found.outputs)) for found in [await first]] == [(False, 1)]
    assert not worker.has("more")
    for _ in range(AHEAD // 2 - 1):
        await anext(stream)
    header, _ = await worker.get("more")
    assert (header.more.job_id, header.more.credits) == (job.job_id, AHEAD // 2)
    worker.answer(job, outputs=[])
    rest = [response async for response in stream]
    assert [(found.is_final, len(found.outputs)) for found in rest] == [*[(False, 1)] * (AHEAD // 2), (True, 0)]
    assert bed.dispatcher.count_jobs() == 0
    assert not worker.has("cancel")


async def test_a_worker_that_sends_more_answers_than_allowed_is_refused(bed: Bed) -> None:
    worker = await bed.worker()
    stream, first, job = await begin(bed, worker)
    worker.answer(job, is_partial=True)
    await first
    for _ in range(AHEAD + 1):
        worker.answer(job, is_partial=True)
    refused = await worker.get_refused()
    assert refused.message == "a worker may send at most 8 answers before the caller takes them"
    assert bed.counted("wire_errors") == 1
    worker.answer(job)
    assert len([response async for response in stream]) == AHEAD + 1


async def test_results_in_one_message_are_separated(bed: Bed) -> None:
    worker = await bed.worker("a", offer(block(), 2))
    stream, first, job = await begin(bed, worker)
    answer = bed.ask()
    other = await worker.get_job()
    header = pb.Header()
    results = header.results.results
    for _ in range(AHEAD + 2):
        job_messages.add_result(results, job.job_id, 1, [TENSOR], Timing(), {"tokens": 2}, True)
    job_messages.add_result(results, other.job_id, 1, [TENSOR], Timing())
    job_messages.add_failure(results, job.job_id, 1, EngineFailed("it broke"))
    worker.send_raw(job_messages.encode(header))
    assert ((await first).parameters, (await answer).outputs) == ({"tokens": 2}, [TENSOR])
    assert (await worker.get_refused()).message == "a worker may send at most 8 answers before the caller takes them"
    with pytest.raises(EngineFailed, match="it broke"):
        assert [response.outputs async for response in stream] == []


async def test_a_stream_that_is_closed_early_is_cancelled(bed: Bed) -> None:
    worker = await bed.worker()
    stream, first, job = await begin(bed, worker)
    worker.answer(job, is_partial=True)
    await first
    await stream.aclose()
    header, _ = await worker.get("cancel")
    assert list(header.cancel.job_ids) == [job.job_id]
    assert bed.dispatcher.count_jobs() == 0
    worker.answer(job, is_partial=True)
    await bed.until_counted("late_replies")


async def test_a_stream_is_cancelled_with_its_waiting_caller(bed: Bed) -> None:
    worker = await bed.worker()
    _, first, _ = await begin(bed, worker)
    first.cancel()
    await worker.get("cancel")
    assert bed.dispatcher.count_jobs() == 0


async def test_a_stream_fails_after_its_earlier_answers(bed: Bed) -> None:
    worker = await bed.worker()
    stream, first, job = await begin(bed, worker)
    worker.answer(job, is_partial=True)
    worker.send_raw(job_messages.encode_failure(job.job_id, job.attempt, EngineFailed("it broke")))
    assert not (await first).is_final
    with pytest.raises(EngineFailed, match="it broke"):
        await anext(stream)
    assert not worker.has("cancel")


async def test_a_stream_with_answers_is_never_run_again(bed: Bed) -> None:
    first, second = await bed.worker("a"), bed.peer("b")
    stream, answer, job = await begin(bed, first)
    first.answer(job, is_partial=True)
    await answer
    await second.join(offer(block()))
    first.send(bye={})
    with pytest.raises(WorkerLost, match="a partial answer cannot be resumed"):
        await anext(stream)
    assert not second.has("job")


async def test_a_stream_is_refused_if_the_queue_is_full(bed: Bed) -> None:
    full = block(batching={"max_queue": 1})
    await bed.worker("a", offer(full))
    bed.ask(full)
    bed.ask(full)
    await until(lambda: bed.dispatcher.count_jobs() == 2)
    with pytest.raises(QueueFull):
        await anext(follow(bed, full))
    assert bed.dispatcher.count_jobs() == 2


def later() -> float:
    return asyncio.get_running_loop().time() + 60.0
