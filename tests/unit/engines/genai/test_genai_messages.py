"""Messages between an engine and its process survive encoding."""

import orjson

from penstock.core.errors import RequestTooLarge
from penstock.core.generation import CONTEXT_LENGTH, Delta, Generation, GenerationState, Progress, Prompt, Sampling
from penstock.engines.genai.genai_messages import pack_generation, pack_step, unpack_generation, unpack_step


def test_a_generation_survives_encoding() -> None:
    prompt = Prompt("a", [5, 6], [{"role": "user"}], [{"type": "function"}], {"b": 1}, is_echoed=True)
    asked = Generation(prompt, Sampling(max_tokens=3, stop=("a", "b")), priority=2)
    assert unpack_generation(orjson.loads(orjson.dumps(pack_generation(7, asked)))) == asked


def test_a_step_survives_encoding() -> None:
    deltas = [Delta(0, "é", [7, 8], [-0.5, -1.0], "stop", [b"\xc3", b"\xa9"]), Delta(1, "a", [9], [], "", [])]
    progress = [Progress(3, deltas, 5, -1, None, True)]
    step = unpack_step(orjson.loads(orjson.dumps(pack_step(progress, GenerationState(steps=2)))))
    assert step.progress == progress
    assert step.state == GenerationState(steps=2)


def test_an_error_keeps_its_reason() -> None:
    failed = Progress(3, failure=RequestTooLarge("too long", reason=CONTEXT_LENGTH), is_over=True)
    (arrived,) = unpack_step(pack_step([failed], GenerationState())).progress
    assert isinstance(arrived.failure, RequestTooLarge)
    assert arrived.failure.reason == CONTEXT_LENGTH
