"""The answers to one streamed request."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from penstock.core.errors import WorkerLost
from penstock.core.requests import InferResponse, Timing
from penstock.router.answers import AnswerStream

FINAL = 9


def answer(number: int) -> InferResponse:
    return InferResponse("m", "1", str(number), [], Timing(), is_final=number == FINAL)


class Source:
    """A run that ends when the test says so."""

    def __init__(self) -> None:
        self.answers = AnswerStream()
        self.allowed: list[int] = []
        self.end: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False

    def follow(self) -> AsyncGenerator[InferResponse, None]:
        return self.answers.follow(self._run())

    async def _run(self) -> InferResponse:
        try:
            return await self.end
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_answers_come_in_order_and_the_returned_one_last() -> None:
    source = Source()
    assert not source.answers.has_begun
    assert source.answers.put(answer(1))
    assert source.answers.put(answer(2))
    assert source.answers.has_begun
    source.end.set_result(answer(FINAL))
    assert [found.request_id async for found in source.follow()] == ["1", "2", "9"]


async def test_a_source_that_does_not_wait_is_refused() -> None:
    source = Source()
    source.answers.begin(1, source.allowed.append)
    assert source.answers.put(answer(1))
    assert not source.answers.put(answer(2))


async def test_the_source_continues_when_half_of_its_answers_are_taken() -> None:
    source = Source()
    source.answers.begin(4, source.allowed.append)
    for number in range(4):
        assert source.answers.put(answer(number))
    async with aclosing(source.follow()) as found:
        await anext(found)
        assert source.allowed == []
        await anext(found)
        assert source.allowed == [2]
        await anext(found)
        await anext(found)
        assert source.allowed == [2, 2]


async def test_a_caller_waits_for_the_next_answer_and_gets_the_failure_after_it() -> None:
    source = Source()
    async with aclosing(source.follow()) as found:
        waiting = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0)
        source.answers.put(answer(1))
        source.end.set_exception(WorkerLost("gone"))
        assert (await waiting).request_id == "1"
        with pytest.raises(WorkerLost):
            await anext(found)
    assert not source.was_cancelled


async def test_closing_the_stream_cancels_the_run() -> None:
    source = Source()
    source.answers.put(answer(1))
    found = source.follow()
    await anext(found)
    await asyncio.sleep(0)  # lets the run start
    await found.aclose()
    assert source.was_cancelled


async def test_a_caller_that_is_cancelled_while_it_waits_cancels_the_run() -> None:
    source = Source()
    waiting = asyncio.ensure_future(anext(source.follow()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert source.was_cancelled
