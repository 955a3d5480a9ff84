"""A block that generates text: whole answers, streamed ones, slow readers, and callers that leave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.waiting import until
from penstock.core.errors import DeadlineExceeded, Draining, EngineFailed, InvalidRequest, QueueTimeout
from penstock.core.generation import Progress
from penstock.core.settings import Priorities, QueuePolicy
from penstock.tasks.options import GenerateOptions
from penstock.worker.running.budget import credits_of
from tests.generating_bed import GeneratingBed, generate_settings, grown, request_of


@pytest.fixture
async def bed() -> AsyncIterator[GeneratingBed]:
    made = GeneratingBed()
    yield made
    await made.runner.close().wait()
    assert made.engine.is_closed.is_set()
    assert len(made.runner) == 0


async def turn() -> None:
    """Wait until the loop has handled the reports of an engine's thread."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_whole_answer_is_sent_at_the_end(bed: GeneratingBed) -> None:
    bed.send(1)
    ((number, generation),) = bed.engine.added.items()
    assert (generation.prompt.text, generation.sampling.temperature, generation.priority) == ("Once", 0.5, 1)
    assert (bed.runner.waiting, bed.runner.idle, len(bed.runner)) == (1, 1, 1)
    bed.engine.step(grown(number, " upon", first=3))
    await turn()
    assert (bed.runner.waiting, bed.runner.idle, bed.ended) == (0, 0, {})
    bed.engine.step(grown(number, " a", "length", is_over=True))
    await until(lambda: 1 in bed.ended)
    expected: dict[str, list[Any]] = {
        "text_output": [" upon a"],
        "index": [0],
        "finish_reason": ["length"],
        "usage": [3, 2, 0],
    }
    assert bed.ended[1] == expected
    assert (bed.partials, bed.tokens[1]) == ({}, [5])
    assert (bed.engine.cancelled, bed.runner.idle) == ([], 1)
    statistics = bed.runner.statistics
    assert (statistics.success.count, statistics.inference_count, statistics.queue.count) == (1, 1, 1)
    await bed.runner.drain()


async def test_prompts_and_their_choices_have_ordered_indices(bed: GeneratingBed) -> None:
    bed.send(
        1,
        request_of(["a", "b"], n=2, outputs=["text_output", "index", "token_ids", "counts", "logprobs", "token_bytes"]),
    )
    first, second = bed.engine.added
    assert bed.engine.added[first].sampling.has_logprobs
    bed.engine.step(grown(second, "b1", "stop", 1), grown(first, "a0", "stop", 0))
    bed.engine.step(grown(second, "b0!", "stop", 0, is_over=True), grown(first, "a1", "stop", 1, is_over=True))
    await until(lambda: 1 in bed.ended)
    expected: dict[str, list[Any]] = {
        "text_output": ["a0", "a1", "b0!", "b1"],
        "index": [0, 1, 2, 3],
        "token_ids": [2, 2, 3, 2],
        "counts": [1, 1, 1, 1],
        "logprobs": [-0.5] * 4,
        "token_bytes": ["a0", "a1", "b0!", "b1"],
    }
    assert bed.ended[1] == expected


async def test_a_stream_gets_each_step_and_the_last_one_has_the_reason(bed: GeneratingBed) -> None:
    bed.send(1, response_credits=8)
    (number,) = bed.engine.added
    bed.engine.step(grown(number, "a", first=4))
    bed.engine.step(Progress(number))
    bed.engine.step(grown(number, ""))  # half a character: no text yet
    bed.engine.step(grown(number, "b"))
    bed.engine.step(grown(number, "c", "stop", is_over=True))
    await until(lambda: 1 in bed.ended)
    assert bed.texts(1) == ["a", "b"]
    last = bed.ended[1]
    assert isinstance(last, dict)
    assert (last["text_output"], last["finish_reason"], last["usage"]) == (["c"], ["stop"], [4, 4, 0])
    assert bed.tokens[1] == [5, 2, 1]


async def test_steps_without_response_credits_are_joined(bed: GeneratingBed) -> None:
    slow = bed.send(1, response_credits=1)
    bed.send(2, response_credits=8)
    one, other = bed.engine.added
    for letter in "abcd":
        bed.engine.step(grown(one, letter), grown(other, letter))
    await until(lambda: len(bed.texts(2)) == 4)
    assert bed.texts(1) == ["a"]
    bed.runner.allow(slow, 2)
    assert bed.texts(1) == ["a", "bcd"]
    bed.engine.step(grown(one, "e"))
    bed.engine.step(grown(one, "f"))
    bed.engine.step(grown(one, "g", "length", is_over=True))
    await until(lambda: 1 in bed.ended)
    last = bed.ended[1]
    assert isinstance(last, dict)
    assert (bed.texts(1), last["text_output"]) == (["a", "bcd", "e"], ["fg"])


async def test_a_stream_can_request_one_whole_answer(bed: GeneratingBed) -> None:
    job = bed.send(1, request_of(stream=False), response_credits=8)
    (number,) = bed.engine.added
    bed.engine.step(grown(number, "a"))
    await turn()
    bed.runner.allow(job, 1)
    bed.engine.step(grown(number, "b", "stop", is_over=True))
    await until(lambda: 1 in bed.ended)
    last = bed.ended[1]
    assert isinstance(last, dict)
    assert (bed.partials, last["text_output"]) == ({}, ["ab"])


async def test_the_prompt_is_returned_on_request(bed: GeneratingBed) -> None:
    bed.send(1, request_of(["a ", "b "], echo=True))
    for number in bed.engine.added:
        bed.engine.step(grown(number, "c", "stop", is_over=True))
    await until(lambda: 1 in bed.ended)
    last = bed.ended[1]
    assert isinstance(last, dict)
    assert last["text_output"] == ["a c", "b c"]


async def test_a_cancelled_job_leaves_the_engine_at_once_without_an_answer(bed: GeneratingBed) -> None:
    job = bed.send(1, request_of(["a", "b"]), response_credits=8)
    one, other = bed.engine.added
    bed.engine.step(grown(one, "a", "stop", is_over=True))
    await until(lambda: bool(bed.partials))
    bed.engine.step(grown(other, "b"))  # in flight when it is cancelled
    bed.runner.cancel(job)
    assert bed.engine.cancelled == [other]
    await turn()
    assert (len(bed.partials[1]), bed.ended, bed.runner.idle) == (1, {}, 1)
    bed.runner.allow(job, 1)
    bed.runner.cancel(job)
    assert bed.engine.cancelled == [other]


async def test_a_deadline_ends_waiting_and_running_generations(bed: GeneratingBed) -> None:
    bed.send(1, timeout_s=0.03)
    bed.send(2, timeout_s=0.03, response_credits=8)
    waiting, running = bed.engine.added
    bed.engine.step(grown(running, "a"))
    await until(lambda: len(bed.ended) == 2)
    assert all(isinstance(outcome, DeadlineExceeded) for outcome in bed.ended.values())
    assert sorted(bed.engine.cancelled) == [waiting, running]


async def test_a_queue_policy_applies_until_the_first_token() -> None:
    levels = Priorities(levels=2, by_level={2: QueuePolicy(on_timeout="delay")})
    bed = GeneratingBed(generate_settings(priorities=levels))
    soon = asyncio.get_running_loop().time() + 0.02
    bed.send(1, queue_deadline=soon)
    bed.send(2, queue_deadline=soon, priority=2)
    bed.send(3, queue_deadline=soon)
    started = list(bed.engine.added)[2]
    bed.engine.step(grown(started, "a"))
    await until(lambda: len(bed.engine.added) == 4)  # the delayed job is added again, behind all others
    assert [each.priority for each in bed.engine.added.values()] == [1, 2, 1, 1002]
    await until(lambda: 1 in bed.ended)
    assert isinstance(bed.ended[1], QueueTimeout)
    assert list(bed.ended) == [1]
    await bed.runner.close().wait()


async def test_a_failure_in_the_engine_fails_all_generations_of_its_job_only(bed: GeneratingBed) -> None:
    bed.send(1, request_of(["a", "b"]))
    bed.send(2)
    one, other, third = bed.engine.added
    bed.engine.step(Progress(one, failure=EngineFailed("it crashed")), grown(other, "b"), grown(third, "c"))
    await until(lambda: 1 in bed.ended)
    assert isinstance(bed.ended[1], EngineFailed)
    assert bed.engine.cancelled == [other]
    bed.engine.step(grown(third, "d", "stop", is_over=True))
    await until(lambda: 2 in bed.ended)


async def test_an_invalid_request_never_reaches_the_engine(bed: GeneratingBed) -> None:
    bed.send(1, request_of(temperature=3))
    error = bed.ended[1]
    assert isinstance(error, InvalidRequest)
    assert error.message == "parameter 'temperature' is '3'; it must be a number from 0 to 2"
    assert bed.engine.added == {}


async def test_only_jobs_that_have_not_started_are_recalled(bed: GeneratingBed) -> None:
    started, waiting = bed.send(1), bed.send(2)
    one, other = bed.engine.added
    bed.engine.step(grown(one, "a"))
    await turn()
    assert not bed.runner.recall(started)
    assert bed.runner.hand_back() == [waiting]
    assert bed.engine.cancelled == [other]


async def test_unloading_a_block_fails_its_jobs_with_the_reason(bed: GeneratingBed) -> None:
    bed.send(1)
    bed.runner.close()
    assert isinstance(bed.ended[1], Draining)
    assert bed.engine.cancelled == list(bed.engine.added)


async def test_a_probe_asks_the_engine(bed: GeneratingBed) -> None:
    told: list[str] = []
    bed.engine.problem = "its process is gone"
    bed.runner.probe(told.append)
    await until(lambda: told == ["its process is gone"])


async def test_a_worker_offers_credits_for_twice_the_running_generations() -> None:
    settings = generate_settings(generate=GenerateOptions(max_running=12))
    assert credits_of(settings.for_block(), settings.instance_count()) == 24
