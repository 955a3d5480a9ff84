"""OpenVINO GenAI in its own process, with the shipped model."""

import json
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from benchmarks.waiting import eventually
from penstock.core.errors import ConfigError, EngineFailed, InvalidRequest, PenstockError, RequestTooLarge
from penstock.core.generation import Generation, GenerationState, GenerationStep, Progress, Prompt, Sampling
from penstock.engines.engine_options import GenaiOptions
from penstock.engines.engine_protocols import EngineSpec
from penstock.engines.genai.genai_engine import GenaiEngine, GenerationLimits

SMOLLM2 = Path(__file__).parents[4] / "models" / "smollm2" / "1" / "model.gguf"
WAIT_S = 120.0
COMPUTES_IN_BF16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LONG = Sampling(max_tokens=1500, temperature=0.0, ignore_eos=True)
PROMPTS = ("Water boils at", "The capital of France is", "Once upon a time", "def add(a, b):", "Ein Bär im Wald")


@dataclass
class Answer:
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = -1
    failure: PenstockError | None = None


class Asker:
    """Sends requests to an engine, and sorts its reports by request."""

    def __init__(self, **settings: Any) -> None:
        limits = GenerationLimits(max_running=settings.pop("max_running", 8))
        options = GenaiOptions(**{"cache_mb": 128, **settings})
        self.engine = GenaiEngine(EngineSpec(SMOLLM2, "auto", 2, 1), options, limits, hang_s=WAIT_S)
        self.signature = self.engine.load()
        self.state = GenerationState()
        self._told: dict[int, queue.Queue[Progress]] = {}
        self._numbers = count(1)
        self.engine.start(self._tell)

    def add(self, prompt: str | Sequence[int] | Prompt, sampling: Sampling = GREEDY, priority: int = 1) -> int:
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt)
        elif not isinstance(prompt, Prompt):
            prompt = Prompt(ids=prompt)
        number = next(self._numbers)
        self._told[number] = queue.Queue()
        self.engine.add(number, Generation(prompt, sampling, priority))
        return number

    def wait(self, number: int) -> Answer:
        answer = Answer()
        while True:
            progress = self.next_of(number)
            answer.prompt_tokens = answer.prompt_tokens or progress.prompt_tokens
            answer.cached_tokens = max(answer.cached_tokens, progress.cached_tokens)
            for delta in progress.deltas:
                answer.texts[delta.choice] = answer.texts.get(delta.choice, "") + delta.text
                answer.ids.setdefault(delta.choice, []).extend(delta.token_ids)
                answer.logprobs += delta.logprobs
                answer.pieces.append(delta.text)
                if delta.finish_reason:
                    answer.reasons[delta.choice] = delta.finish_reason
            if progress.is_over:
                answer.failure = progress.failure
                return answer

    def next_of(self, number: int) -> Progress:
        return self._told[number].get(timeout=WAIT_S)

    def wait_begun(self, number: int) -> None:
        while not self.next_of(number).deltas:
            pass

    def ask(self, prompt: str | Sequence[int] | Prompt, sampling: Sampling = GREEDY) -> Answer:
        return self.wait(self.add(prompt, sampling))

    @property
    def pid(self) -> int:
        return self.engine._supervisor.process().pid

    def _tell(self, step: GenerationStep) -> None:
        self.state = step.state
        for progress in step.progress:
            self._told[progress.number].put(progress)


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    asker = Asker()
    yield asker
    asker.engine.close()


def chat(text: str) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}])


def test_the_engine_reports_its_inputs_and_context_length(asker: Asker) -> None:
    assert {each.name for each in asker.signature.inputs} == {"text_input", "input_ids", "messages"}
    assert asker.signature.platform == "openvino_genai"
    assert asker.engine.context_tokens == 8192
    assert asker.engine.probe() == ""


def test_greedy_answers_equal_those_of_the_bare_pipeline(asker: Asker) -> None:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.cache_size, scheduler.enable_prefix_caching = 64, 0, True
    bare = genai.ContinuousBatchingPipeline(SMOLLM2, scheduler, "CPU", {"INFERENCE_NUM_THREADS": 2})
    for number, prompt in enumerate(PROMPTS):
        handle = bare.add_request(number, prompt, genai.GenerationConfig(max_new_tokens=12))
        while bare.has_non_finished_requests():
            bare.step()
        expected = handle.read_all()[0].generated_ids
        answer = asker.ask(prompt)
        assert answer.ids[0] == expected
        assert answer.texts[0] == bare.get_tokenizer().decode(expected)


def test_a_conversation_is_formatted_by_the_models_template(asker: Asker) -> None:
    answer = asker.ask(chat("Say hello."), Sampling(max_tokens=64, temperature=0.0))
    assert answer.reasons == {0: "stop"}
    assert "hello" in answer.texts[0].lower()
    assert "<|" not in answer.texts[0]
    assert answer.prompt_tokens > 20, "the template brings a system message"


def test_the_beginning_of_a_conversation_is_not_computed_again(asker: Asker) -> None:
    """Each step takes at most 256 tokens of prompts, so the number of steps shows what was computed."""
    said = "Tell me about the rivers of the north. " * 80
    steps = asker.state.steps
    first = asker.ask(said, Sampling(max_tokens=8, temperature=0.0))
    assert first.cached_tokens == 0
    assert asker.state.steps - steps == -(-first.prompt_tokens // 256) + 7
    before, steps = asker.state.cached_tokens, asker.state.steps
    second = asker.ask(said + first.texts[0] + " And of the south?", Sampling(max_tokens=1, temperature=0.0))
    assert second.cached_tokens >= first.prompt_tokens
    assert asker.state.cached_tokens - before == second.cached_tokens
    assert asker.state.steps - steps == 1, "all tokens but the last ones were in the cache"


def test_a_seed_gives_the_same_answer_again(asker: Asker) -> None:
    seeded = Sampling(max_tokens=12, seed=7, n=2)
    first = asker.ask(PROMPTS[0], seeded)
    assert asker.ask(PROMPTS[0], seeded).texts == first.texts
    assert first.texts[0] != first.texts[1]
    assert asker.ask(PROMPTS[0], Sampling(max_tokens=12)).texts[0] not in first.texts.values()


@pytest.mark.skipif(COMPUTES_IN_BF16, reason="the rounding of BF16 depends on the other requests in a batch")
def test_a_seed_gives_the_same_answer_in_a_batch(asker: Asker) -> None:
    seeded = Sampling(max_tokens=12, seed=7, n=2)
    first = asker.ask(PROMPTS[0], seeded)
    others = [asker.add(prompt, Sampling(max_tokens=20)) for prompt in PROMPTS]
    again = asker.ask(PROMPTS[0], seeded)
    for number in others:
        asker.wait(number)
    assert again.texts == first.texts


def test_all_choices_of_greedy_decoding_are_equal(asker: Asker) -> None:
    answer = asker.ask(PROMPTS[0], Sampling(max_tokens=4, temperature=0.0, n=3))
    assert set(answer.texts) == set(answer.reasons) == {0, 1, 2}
    assert len(set(answer.texts.values())) == 1


def test_a_stop_string_ends_the_answer_and_no_part_of_it_is_sent(asker: Asker) -> None:
    sampling = Sampling(max_tokens=40, temperature=0.0, stop=("seven",))
    answer = asker.ask("Count: one, two, three,", sampling)
    assert answer.reasons == {0: "stop"}
    assert answer.texts[0].endswith("six, ")
    eventually(lambda: asker.state.running == 0, "its place is free")


def test_logprobs_are_returned_for_each_token(asker: Asker) -> None:
    answer = asker.ask(PROMPTS[0], Sampling(max_tokens=4, temperature=0.0, has_logprobs=True))
    assert len(answer.logprobs) == len(answer.ids[0]) == 4
    assert all(logprob <= 0 for logprob in answer.logprobs)


def test_an_answer_follows_a_schema(asker: Asker) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
    sampling = Sampling(max_tokens=40, temperature=0.0, json_schema=json.dumps(schema))
    answer = asker.ask(chat("How old is Bob?"), sampling)
    assert json.loads(answer.texts[0])["age"] in (1, 2)


@pytest.mark.parametrize(
    "schema", ["{", "[]", '{"type": "nonsense"}', '{"type": "string", "minLength": 99999}', '{"not": {"type": "null"}}']
)
def test_a_broken_schema_fails_only_its_request(asker: Asker, schema: str) -> None:
    other = asker.add(PROMPTS[0], Sampling(max_tokens=30, temperature=0.0))
    answer = asker.ask("x", Sampling(max_tokens=4, json_schema=schema))
    assert isinstance(answer.failure, InvalidRequest)
    assert "the JSON schema cannot be used: " in answer.failure.message
    assert asker.wait(other).reasons == {0: "length"}


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "said"),
    [
        ("", GREEDY, InvalidRequest, "the prompt is empty"),
        ([1, 99_999_999], GREEDY, InvalidRequest, "input_ids has the unknown token 99999999"),
        ("x " * 9000, GREEDY, RequestTooLarge, "8192 tokens or more and an answer of 12 is more than .*max_context"),
        ("x" * 2_000_000, GREEDY, RequestTooLarge, "2000000 characters is more than 8192 tokens"),
        ("x", Sampling(max_tokens=8192), RequestTooLarge, "an answer of 8192 is more than the model's context"),
        ("x", Sampling(n=9), RequestTooLarge, r"at most 8 sequences .* \(generate.max_running\)"),
        ("x", Sampling(max_tokens=8000, n=8), RequestTooLarge, r"8 answers of 8000 .* \(genai.cache_mb\)"),
    ],
)
def test_a_request_that_can_never_be_generated_is_refused(
    asker: Asker, prompt: str | list[int], sampling: Sampling, error: type[PenstockError], said: str
) -> None:
    failure = asker.ask(prompt, sampling).failure
    assert isinstance(failure, error)
    with pytest.raises(error, match=said):
        raise failure


def test_any_text_can_be_a_prompt(asker: Asker) -> None:
    for prompt in ("a\ud800b", "\x00\x01\uffff", "🤖" * 50, " ", "\n"):
        assert asker.ask(prompt, Sampling(max_tokens=1, temperature=0.0)).reasons == {0: "length"}


def test_cancelling_a_generation_frees_its_place_at_once(asker: Asker) -> None:
    running = [asker.add(prompt, LONG) for prompt in PROMPTS]
    for number in running:
        asker.wait_begun(number)
    assert asker.state.running == len(PROMPTS)
    assert asker.state.cache_blocks_used >= len(PROMPTS)
    for number in running:
        asker.engine.cancel(number)
    eventually(lambda: (asker.state.running, asker.state.cache_blocks_used) == (0, 0), "all is free")
    asker.ask(PROMPTS[0])


def test_two_hundred_concurrent_requests_are_all_answered(asker: Asker) -> None:
    numbers = [asker.add(f"{index} is", Sampling(max_tokens=2, temperature=0.0)) for index in range(200)]
    assert {asker.wait(number).reasons[0] for number in numbers} == {"length"}
    assert (asker.state.running, asker.state.waiting) == (0, 0)


def test_the_most_urgent_joins_first(asker: Asker) -> None:
    full = [asker.add(PROMPTS[0], LONG) for _ in range(8)]
    for number in full:
        asker.wait_begun(number)
    later, urgent = asker.add("a", LONG, priority=2), asker.add("b", Sampling(max_tokens=2), priority=1)
    asker.engine.cancel(full[0])
    asker.wait(urgent)
    asker.wait_begun(later)
    for number in (*full, later):
        asker.engine.cancel(number)


def test_a_killed_process_fails_only_the_generations_that_had_joined(asker: Asker) -> None:
    joined = [asker.add(PROMPTS[0], LONG) for _ in range(8)]
    for number in joined:
        asker.wait_begun(number)
    waiting = asker.add(PROMPTS[1])
    steps, before = asker.state.steps, asker.pid
    os.kill(before, signal.SIGKILL)
    for number in joined:
        failure = asker.wait(number).failure
        assert isinstance(failure, EngineFailed)
        assert failure.reason == "process_ended"
        assert "signal 9, SIGKILL" in failure.message
    assert asker.wait(waiting).reasons == {0: "length"}
    assert asker.pid != before
    assert asker.state.steps > steps, "counters continue"


def test_a_hanging_process_is_killed(asker: Asker) -> None:
    hanging = asker.add(PROMPTS[0], LONG)
    asker.wait_begun(hanging)
    process = asker.engine._supervisor.process()
    os.kill(process.pid, signal.SIGSTOP)
    process._hang_s = 0.5
    failure = asker.wait(hanging).failure
    assert isinstance(failure, EngineFailed)
    assert (failure.reason, "a step did not end within 0.5 s" in failure.message) == ("process_ended", True)
    assert asker.ask(PROMPTS[0]).reasons == {0: "length"}


def test_preempted_answers_stay_the_same_when_the_cache_is_full() -> None:
    asker = Asker(cache_mb=16)  # room for 1,216 tokens
    try:
        sampling = Sampling(max_tokens=90, temperature=0.0, ignore_eos=True)
        prompts = [[1000 + index, *range(2000, 2189)] for index in range(5)]
        numbers = [asker.add(prompt, sampling) for prompt in prompts]
        answers = [asker.wait(number) for number in numbers]
        assert {len(answer.ids[0]) for answer in answers} == {90}
        assert asker.state.preemptions > 0
    finally:
        asker.engine.close()


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "1" / "model.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF nothing")
    engine = GenaiEngine(EngineSpec(file, "auto", 1, 1), GenaiOptions(), GenerationLimits())
    with pytest.raises(ConfigError, match=r"model.gguf: cannot be read: the file is cut off after 12 bytes"):
        engine.load()
