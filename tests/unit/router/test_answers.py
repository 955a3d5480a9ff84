"""The answers of one job that has several."""

import asyncio

import pytest

from penstock.core.errors import WorkerLost
from penstock.core.requests import InferResponse, Timing
from penstock.router.answers import AnswerStream


def answer(number: int, is_final: bool = False) -> InferResponse:
    return InferResponse("m", "1", str(number), [], Timing(), is_final=is_final)


async def test_answers_come_in_order_and_the_end_last() -> None:
    answers = AnswerStream(2)
    assert answers.put(answer(1))
    assert answers.put(answer(2))
    answers.end(answer(3, is_final=True))
    assert [(await answers.get()).request_id for _ in range(3)] == ["1", "2", "3"]


async def test_a_worker_that_does_not_wait_is_found_out() -> None:
    answers = AnswerStream(1)
    assert answers.put(answer(1))
    assert not answers.put(answer(2))


async def test_a_caller_waits_for_the_next_and_hears_of_failure() -> None:
    answers = AnswerStream(1)
    waiting = asyncio.create_task(answers.get())
    await asyncio.sleep(0)
    answers.put(answer(1))
    assert (await waiting).request_id == "1"
    answers.end(WorkerLost("gone"))
    answers.end(answer(9, is_final=True))  # the first end stands
    with pytest.raises(WorkerLost):
        await answers.get()
