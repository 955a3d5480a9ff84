"""Results of a load of generated text: each token and each answer counts in the window of its arrival."""

import asyncio
from array import array

import pytest

from penstock.core.errors import InvalidRequest
from penstock.experiments.load.drivers import Rejected
from penstock.experiments.load.generation_drivers import CompletionEvents, OnTokens, StreamedAnswer, Usage
from penstock.experiments.load.latencies import Latencies
from penstock.experiments.load.load_process import TextLoad, TextSpec, Window, WindowOutcome, merge_outcomes
from penstock.experiments.load.steady import is_steady, measured
from penstock.experiments.load.tokens import AnswerPace, TokenFigures, parse_bounds, summarize
from penstock.pb.inference import grpc_service_pb2 as pb


def test_token_times_count_each_token_of_a_message() -> None:
    found, answer = TokenFigures(), AnswerPace(10.0)
    for at, new in ((10.5, 1), (10.6, 1), (11.0, 4)):
        found.add_tokens(answer, new, at)
    found.end_answer(answer, (7, 6), 11.1, {"ttft": 500.1, "tpot": 101, "e2el": 1101})
    figures = summarize(found, answered=1, seconds=2.0, has_bounds=True)
    assert figures["first_token_ms"]["p50"] == pytest.approx(500, rel=0.002)
    assert len(found.between) == 5
    assert figures["between_tokens_ms"]["mean"] == pytest.approx(100, rel=0.002)
    assert figures["token_ms"]["p50"] == pytest.approx(100, rel=0.002)
    assert figures["request_tokens_per_s"]["p50"] == pytest.approx(10, rel=0.002)
    assert (figures["tokens_per_s"], figures["prompt_tokens_per_s"]) == (3.0, 3.5)
    assert (figures["prompt_tokens_mean"], figures["output_tokens_mean"]) == (7.0, 6.0)
    assert figures["goodput_per_s"] == 0.5


def test_a_whole_answer_has_tokens_but_no_first_token() -> None:
    found = TokenFigures()
    found.end_answer(AnswerPace(0.0), (3, 20), 2.0, {"tpot": 99})
    figures = summarize(found, 1, 2.0, has_bounds=True)
    assert (figures["tokens_per_s"], figures["first_token_ms"], figures["between_tokens_ms"]) == (10.0, None, None)
    assert figures["request_tokens_per_s"]["p50"] == pytest.approx(10, rel=0.002)
    assert figures["goodput_per_s"] == 0.0  # one token took 100 ms
    assert summarize(TokenFigures(), 0, 2.0, has_bounds=False)["goodput_per_s"] is None


def test_tokens_without_times_are_counted_at_the_end() -> None:
    found, answer = TokenFigures(), AnswerPace(0.0)
    found.add_tokens(answer, 1, 1.0)
    found.add_tokens(answer, 1, 2.0)
    found.end_answer(answer, (3, 5), 2.0, {})  # some pieces of text had several tokens
    assert (found.tokens, found.ended_tokens, len(found.between)) == (5, 5, 1)


def test_bounds_of_latencies_are_parsed() -> None:
    assert parse_bounds("ttft:500, tpot:50", is_streamed=True) == {"ttft": 500.0, "tpot": 50.0}
    assert parse_bounds("", is_streamed=True) == {}
    for text in ("ttft", "first:5", "tpot:x", "e2el:0"):
        with pytest.raises(InvalidRequest, match="NAME:MILLISECONDS"):
            parse_bounds(text, is_streamed=True)
    with pytest.raises(InvalidRequest, match="no measurable first token"):
        parse_bounds("ttft:5", is_streamed=False)


class Telling:
    """A connection that reports four tokens, one turn of the loop apart."""

    async def open(self, concurrency: int) -> None: ...

    async def call(self, slot: int, number: int, on_tokens: OnTokens) -> Usage | None:
        for _ in range(4):
            await asyncio.sleep(0.002)
            on_tokens(1)
        if number % 5 == 0:
            raise Rejected("FULL")
        return 9, 4

    async def close(self) -> None: ...


async def test_tokens_count_in_every_window_and_answers_where_they_end() -> None:
    load = TextLoad(Telling(), Window(0.2, concurrency=3, most=2), 1, TextSpec(bounds={"e2el": 10_000}))
    outcomes = [WindowOutcome.from_json(outcome.to_json()) async for outcome in load.windows()]
    for outcome in outcomes:
        tokens = outcome.tokens
        assert tokens is not None
        assert tokens.good == outcome.answered > 0
        assert tokens.prompt_tokens == 9 * outcome.answered
        assert tokens.tokens >= 4 * outcome.answered
        assert outcome.rejected["FULL"] > 0
        assert abs(len(tokens.first) + len(tokens.between) - tokens.tokens) <= 0
    whole = merge_outcomes(outcomes)
    assert whole.tokens is not None
    assert whole.tokens.tokens == sum(each.tokens.tokens for each in outcomes if each.tokens)
    assert whole.pace == whole.tokens.tokens / 0.2


def window(tokens: int, ms: float, answered: int) -> WindowOutcome:
    figures = TokenFigures(tokens=tokens, between=Latencies([ms / 1000] * tokens))
    return WindowOutcome(1.0, answered, {}, Latencies([0.5] * answered), tokens=figures)


def test_a_load_is_stable_by_its_tokens() -> None:
    assert is_steady([window(100, 9, 1), window(104, 9, 4), window(96, 9, 0)])
    assert not is_steady([window(100, 9, 2), window(100, 9, 2), window(150, 9, 2)])
    assert not is_steady([window(100, 9, 2), window(100, 9, 2), window(100, 14, 2)])
    found = measured([window(100, 9, 1), window(104, 9, 4), window(96, 9, 1)])
    assert (found.rps, found.pace) == (2.0, 100.0)
    assert found.tokens is not None
    assert found.tokens.tokens == 300


def part(completion: int, is_final: bool = False) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(raw_output_contents=[b"", array("i", [5, completion, -1]).tobytes()])
    message.outputs.add(name="text_output")
    message.outputs.add(name="usage")
    message.parameters["triton_final_response"].bool_param = is_final
    return message


async def test_tokens_of_a_stream_are_counted_by_the_usage_so_far() -> None:
    received: list[int] = []
    answer = StreamedAnswer(received.append)
    for message in (part(1), part(2), part(5), part(5, is_final=True)):
        answer.receive(message)
    assert received == [1, 1, 3]
    assert await answer.ended == (5, 5)


def test_events_are_read_however_they_are_split() -> None:
    body = (
        b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n: still there\n\ndata: {"choices": [{"text": ""}]}\n\n'
        b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, len(body)):
        received: list[int] = []
        events = CompletionEvents(received.append)
        for start in range(0, len(body), size):
            events.feed(body[start : start + size])
        events.end()
        assert (received, events.usage, events.failure) == ([1, 1], (3, 4), "")


def test_errors_within_events_and_whole_answers_are_read() -> None:
    events = CompletionEvents(lambda new: None)
    events.feed(b'data: {"error": {"code": "worker_lost", "message": "gone"}}\n\n')
    assert events.failure == "worker_lost"
    whole = CompletionEvents(None)
    whole.feed(b'{"choices": [{"text": "a"}], "usage": {"prompt_')
    whole.feed(b'tokens": 3, "completion_tokens": 4}}')
    whole.end()
    assert (whole.usage, whole.failure) == ((3, 4), "")
