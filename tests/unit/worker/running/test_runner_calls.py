"""A block with a model's own code: contexts, sessions, and models with several answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.waiting import until
from penstock.core.errors import DeadlineExceeded, Draining, EngineFailed, InvalidRequest, WorkerLost
from penstock.core.requests import SessionStep
from penstock.core.settings import Batching, Sessions
from tests.worker_bed import Bed, Storyteller, python_settings


def make_bed(is_decoupled: bool = False, idle_s: float = 300.0, is_stateful: bool = False) -> tuple[Bed, Storyteller]:
    engine = Storyteller()
    settings = python_settings(
        is_decoupled,
        batching=Batching(max_rows=8, max_delay_ms=60_000),
        sessions=Sessions(idle_s=idle_s, is_stateful=is_stateful),
    )
    return Bed(settings, engine=engine), engine


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    made, _ = make_bed()
    yield made
    made.close()


@pytest.fixture
async def streaming() -> AsyncIterator[Bed]:
    made, _ = make_bed(is_decoupled=True)
    yield made
    made.close()


def storyteller(bed: Bed) -> Storyteller:
    assert isinstance(bed.engine, Storyteller)
    return bed.engine


# --- one answer


async def test_requests_are_not_joined_do_not_wait_for_others_and_do_not_run_on_the_loop(bed: Bed) -> None:
    for n in range(40):
        bed.send(n, n, request_id=f"r{n}")
    await bed.wait(40)
    engine = storyteller(bed)
    assert engine.batches == [1] * 40
    assert engine.threads == {"m-0"}
    assert [context.request_id for context in engine.contexts] == [f"r{n}" for n in range(40)]
    assert bed.value(7) == 14.0


async def test_the_model_is_notified_of_its_sessions(bed: Bed) -> None:
    bed.send(1, 1, session=SessionStep("s", 1, is_start=True))
    bed.send(2, 1, session=SessionStep("t", 7))
    bed.send(3, 1, session=SessionStep("s", 2))
    bed.send(4, 1, session=SessionStep("s", 3, is_end=True))
    bed.send(5, 1, session=SessionStep("s", 1, is_start=True))
    bed.send(6, 1)
    await bed.wait(6)
    engine = storyteller(bed)
    assert engine.story == ["start s 1", "start t 7", "s 2", "s 3", "s ended", "start s 1", " 0"]
    assert engine.contexts[3].is_end


async def test_a_stateful_model_does_not_continue_sessions_that_it_never_saw() -> None:
    bed, engine = make_bed(is_stateful=True)
    bed.send(1, 1, session=SessionStep("s", 1, is_start=True))
    bed.send(2, 1, session=SessionStep("s", 2))
    bed.send(3, 1, session=SessionStep("of another life", 7))
    await bed.wait(3)
    assert engine.story == ["start s 1", "s 2"]
    assert isinstance(bed.answers[3], WorkerLost)
    bed.send(4, 1, session=SessionStep("of another life", 8))
    await bed.wait(4)
    assert isinstance(bed.answers[4], WorkerLost)
    bed.close()


async def test_a_session_has_ended_before_its_last_answer_is_sent(bed: Bed) -> None:
    bed.send(1, 1, session=SessionStep("s", 1, is_end=True))
    await bed.wait(1)
    assert storyteller(bed).story == ["start s 1", "s ended"]


async def test_a_restarted_session_ends_first(bed: Bed) -> None:
    for n in range(2):
        bed.send(n, 1, session=SessionStep("s", 1, is_start=True))
    await bed.wait(2)
    assert storyteller(bed).story == ["start s 1", "s restarted", "start s 1"]


async def test_a_session_whose_last_step_failed_has_ended(bed: Bed) -> None:
    bed.send(1, -1, session=SessionStep("s", 1, is_end=True))
    bed.send(2, 1, session=SessionStep("s", 1))
    await bed.wait(2)
    assert isinstance(bed.answers[1], EngineFailed)
    assert storyteller(bed).story == ["start s 1", "s ended", "start s 1"]


async def test_an_idle_session_ends_and_is_new_the_next_time() -> None:
    bed, engine = make_bed(idle_s=0.02)
    bed.send(1, 1, session=SessionStep("s"))
    bed.send(2, 1, session=SessionStep("t"))
    await bed.wait(2)
    await until(lambda: len(engine.story) == 4)
    bed.send(3, 1, session=SessionStep("s"))
    await bed.wait(3)
    heard = [line for line in engine.story if "s" in line.split()]
    assert heard[:3] == ["start s 0", "s idle", "start s 0"]
    assert engine.threads == {"m-0"}
    bed.close()


async def test_sessions_end_when_the_worker_leaves() -> None:
    bed, engine = make_bed()
    bed.send(1, 1, session=SessionStep("s"))
    await bed.wait(1)
    await asyncio.wait_for(bed.runner.drain(), 10)
    assert engine.story == ["start s 0", "s worker leaves"]
    bed.close()
    await until(lambda: engine.is_closed)
    assert engine.story == ["start s 0", "s worker leaves"]


async def test_sessions_end_when_a_block_is_closed_without_draining() -> None:
    bed, engine = make_bed()
    bed.send(1, 1, session=SessionStep("s"))
    await bed.wait(1)
    bed.close()
    await until(lambda: engine.is_closed)
    assert engine.story == ["start s 0", "s worker leaves"]


async def test_a_waiting_job_is_handed_back_and_its_session_was_never_known(bed: Bed) -> None:
    engine = storyteller(bed)
    engine.gate.clear()
    bed.send(1, 1, session=SessionStep("s"))
    await until(lambda: engine.entered == 1)
    bed.send(2, 1, session=SessionStep("t"))
    await asyncio.sleep(0)
    assert [job.job_id for job in bed.runner.hand_back()] == [2]
    engine.gate.set()
    await asyncio.wait_for(bed.runner.drain(), 10)
    assert engine.story == ["start s 0", "s worker leaves"]


async def test_a_probe_asks_the_engine_without_a_request_to_the_model(bed: Bed) -> None:
    engine = storyteller(bed)
    told: list[str] = []
    bed.runner.probe(told.append)
    await until(lambda: told == [""])
    engine.problem = "its process has left"
    bed.runner.probe(told.append)
    await until(lambda: len(told) == 2)
    assert told[1] == "its process has left"
    assert engine.entered == 0


# --- many answers


async def test_a_decoupled_model_answers_in_order_and_ends_with_an_empty_answer(streaming: Bed) -> None:
    streaming.send(1, 5, response_credits=8)
    await streaming.wait(1)
    assert streaming.partials == {1: [0.0, 1.0, 2.0, 3.0, 4.0]}
    assert streaming.answers == {1: []}
    statistics = streaming.runner.statistics
    assert (statistics.success.count, statistics.execution_count, statistics.inference_count) == (1, 1, 1)


async def test_a_decoupled_model_can_give_no_answer(streaming: Bed) -> None:
    streaming.send(1, 0, response_credits=1)
    await streaming.wait(1)
    assert (streaming.partials, streaming.answers) == ({}, {1: []})


async def test_the_last_answer_needs_no_credit(streaming: Bed) -> None:
    streaming.send(1, 3, response_credits=3)
    await streaming.wait(1)
    assert streaming.partials == {1: [0.0, 1.0, 2.0]}


async def test_a_decoupled_model_can_only_be_streamed(streaming: Bed) -> None:
    streaming.send(1, 5)
    await streaming.wait(1)
    assert isinstance(streaming.answers[1], InvalidRequest)
    assert "stream" in streaming.answers[1].message
    assert storyteller(streaming).contexts == []


async def test_a_slow_reader_pauses_the_model(streaming: Bed) -> None:
    engine = storyteller(streaming)
    job = streaming.send(1, 1000, response_credits=2)
    await until(lambda: engine.made == 3)
    await asyncio.sleep(0.05)
    assert streaming.partials == {1: [0.0, 1.0]}
    assert engine.made == 3  # one answer is prefetched
    streaming.runner.allow(job, 5)
    await until(lambda: engine.made == 8)
    await asyncio.sleep(0.05)
    assert engine.made == 8
    assert streaming.partials[1] == [float(n) for n in range(7)]
    streaming.runner.cancel(job)


async def test_a_cancel_closes_the_stream_and_frees_its_instance(streaming: Bed) -> None:
    engine = storyteller(streaming)
    job = streaming.send(1, 1000, response_credits=1)
    await until(lambda: engine.made == 2 and streaming.partials == {1: [0.0]})
    streaming.runner.cancel(job)
    await until(engine.stopped.is_set)
    streaming.send(2, 2, response_credits=8)
    await streaming.wait(1)
    assert list(streaming.answers) == [2]
    assert streaming.partials == {1: [0.0], 2: [0.0, 1.0]}
    assert engine.made == 4


async def test_a_cancel_during_an_answer_stops_the_model_after_it(streaming: Bed) -> None:
    engine = storyteller(streaming)
    engine.gate.clear()
    job = streaming.send(1, 1000, response_credits=500)
    await until(lambda: len(engine.contexts) == 1)
    streaming.runner.cancel(job)
    engine.gate.set()
    await until(engine.stopped.is_set)
    assert engine.made == 1
    assert streaming.partials == {}


async def test_the_deadline_closes_the_stream(streaming: Bed) -> None:
    engine = storyteller(streaming)
    streaming.send(1, 1000, response_credits=1, timeout_s=0.3)
    await streaming.wait(1)
    assert isinstance(streaming.answers[1], DeadlineExceeded)
    await until(engine.stopped.is_set)
    assert engine.made == 2


async def test_a_stream_that_expires_while_waiting_is_never_started(streaming: Bed) -> None:
    engine = storyteller(streaming)
    running = streaming.send(1, 1000, response_credits=1)
    await until(lambda: engine.made == 2)
    streaming.send(2, 1000, response_credits=1, timeout_s=0.01)
    await streaming.wait(1)
    assert isinstance(streaming.answers[2], DeadlineExceeded)
    assert len(engine.contexts) == 1
    streaming.runner.cancel(running)


async def test_a_stream_continues_while_its_worker_drains_and_is_cut_when_the_block_is_closed() -> None:
    bed, engine = make_bed(is_decoupled=True)
    job = bed.send(1, 1000, response_credits=1)
    await until(lambda: engine.made == 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bed.runner.drain(), 0.02)
    bed.runner.allow(job, 1)
    await until(lambda: engine.made == 3)
    bed.close()
    assert isinstance(bed.answers[1], Draining)
    await until(lambda: engine.is_closed)
    assert engine.stopped.is_set()
    assert engine.made == 3


async def test_a_model_that_fails_between_answers_has_given_its_answers(streaming: Bed) -> None:
    streaming.send(1, -2, response_credits=8)
    await streaming.wait(1)
    assert streaming.partials == {1: [0.0, 1.0]}
    assert isinstance(streaming.answers[1], EngineFailed)
    assert streaming.runner.statistics.fail.count == 1


async def test_a_stream_can_end_its_session(streaming: Bed) -> None:
    streaming.send(1, 2, response_credits=8, session=SessionStep("s", 1, is_end=True))
    await streaming.wait(1)
    engine = storyteller(streaming)
    assert engine.contexts[0].is_start
    assert engine.story == ["s ended"]


async def test_a_cancelled_stream_has_not_ended_its_session() -> None:
    bed, engine = make_bed(is_decoupled=True)
    job = bed.send(1, 1000, response_credits=1, session=SessionStep("s", 1, is_end=True))
    await until(lambda: engine.made == 2)
    bed.runner.cancel(job)
    await asyncio.wait_for(bed.runner.drain(), 10)
    assert engine.stopped.is_set()
    assert engine.story == ["s worker leaves"]
    bed.close()


async def test_a_hanging_model_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.running.call_runner.CallRunner.close_s", 0.01)
    bed, engine = make_bed()
    engine.gate.clear()
    bed.send(1, 1)
    await until(lambda: engine.entered == 1)
    bed.runner.close()
    await until(lambda: engine.is_closed)
    assert isinstance(bed.answers[1], Draining), "the waiting caller gets an error"
    engine.gate.set()
