"""OpenVINO GenAI's pipeline with what it generates just now: requests join and leave between its steps."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from penstock.core.errors import ConfigError, EngineFailed, InvalidRequest, PenstockError, RequestTooLarge
from penstock.core.generation import (
    CONTEXT_LENGTH,
    LENGTH,
    STOP,
    TOOL_CALLS,
    Delta,
    Generation,
    GenerationStanding,
    Progress,
    Prompt,
    Sampling,
)
from penstock.engines.genai.facts import read_facts
from penstock.engines.genai.line import GenerationLine, LineLimits
from penstock.engines.genai.pieces import ChoiceText, add_tokens

BLOCK_TOKENS = 32  # of the cache; the runtime's, on a CPU
SCALES_BYTES = 8  # kept with each head's numbers, which are bytes
MIB = 1024 * 1024
GREEDY_BELOW = 1e-5  # of the temperature: less is a division by nothing
_REASONS = {
    genai.GenerationFinishReason.STOP: STOP,
    genai.GenerationFinishReason.LENGTH: LENGTH,
    genai.GenerationFinishReason.TOOL_CALL: TOOL_CALLS,
}
_PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


@dataclass(slots=True)
class RunningChoice:
    index: int
    text: ChoiceText
    tokens: int = 0
    is_over: bool = False


@dataclass(slots=True)
class RunningGeneration:
    """A generation from its arrival to its end."""

    number: int
    ids: list[int]
    sampling: Sampling
    config: Any
    handle: Any = None
    choices: dict[int, RunningChoice] = field(default_factory=dict)  # by the pipeline's number of a sequence
    is_preempted: bool = False

    def indices(self, choice: RunningChoice) -> Sequence[int]:
        """Which of the choices asked for it is: the likeliest is the same for all."""
        return range(self.sampling.n) if self.config.num_return_sequences < self.sampling.n else (choice.index,)


@dataclass(slots=True)
class NewTokens:
    """What a step has brought for a choice."""

    running: RunningGeneration
    choice: RunningChoice
    ids: list[int]
    logprobs: list[float]
    reason: str


class GenerationBatch:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Loads the model, which takes seconds; raises ConfigError."""
        file = Path(settings["file"])
        self._facts = read_facts(file)
        self.context_tokens = settings["max_context"] or self._facts.context_tokens
        self.standing = GenerationStanding(cache_blocks=self._cache_blocks(settings["cache_mb"]))
        self._max_batched_tokens = settings["max_batched_tokens"]
        self._precision = _precision(settings["precision"])
        try:
            self._pipeline = genai.ContinuousBatchingPipeline(
                file if file.suffix == ".gguf" else file.parent,
                self._scheduler(settings["prefix_caching"]),
                "CPU",
                _properties(settings["threads"], settings["precision"]),
            )
        except Exception as error:
            raise ConfigError(f"{file}: OpenVINO GenAI cannot load it: {_said(error)}", file=str(file)) from error
        self._tokenizer = self._pipeline.get_tokenizer()
        self._vocabulary = {number: text for text, number in self._tokenizer.get_vocab().items()}
        self._longest_bytes = max(map(len, self._vocabulary.values()), default=1)
        template: str = self._tokenizer.chat_template
        self.has_chat_template = bool(template)
        self._has_tools = "tools" in template
        self._line = GenerationLine(
            LineLimits(self.standing.cache_blocks, BLOCK_TOKENS, settings["max_running"], self._max_batched_tokens)
        )
        self._asked: dict[int, RunningGeneration] = {}
        self._progress: dict[int, Progress] = {}  # what is to be told
        self._warm_up()

    @property
    def is_busy(self) -> bool:
        return bool(self._asked) or self._pipeline.has_non_finished_requests()

    @property
    def running(self) -> list[int]:
        return list(self._line.running)

    def facts(self) -> dict[str, Any]:
        """What the engine is told of the model."""
        return {
            "has_chat_template": self.has_chat_template,
            "context_tokens": self.context_tokens,
            "precision": self._precision,
        }

    # --- between two steps

    def add(self, number: int, generation: Generation) -> None:
        try:
            self._append(number, generation)
        except PenstockError as error:
            self._progress[number] = Progress(number, failure=error, is_over=True)

    def cancel(self, number: int) -> None:
        """What it had of the cache is free when the next step begins: the pipeline leaves it out there."""
        running = self._asked.pop(number, None)
        self._progress.pop(number, None)
        if running is not None and self._line.remove(number):
            running.handle.cancel()

    def join(self) -> list[int]:
        """Hands those to the pipeline for which there is room now. Returns their numbers."""
        joined: list[int] = []
        for group in self._line.join():
            running = self._asked[group.number]
            try:
                running.handle = self._pipeline.add_request(group.number, _tensor(running.ids), running.config)
            except Exception as error:  # noqa: BLE001 - of any kind, as native code throws
                self._end(group.number, _refused(error))
                continue
            self._started(running)
            joined.append(group.number)
        return joined

    def step(self) -> None:
        """May raise anything; then nothing can be said of what the pipeline has."""
        self._pipeline.step()
        self.standing.steps += 1
        news = [new for running in self._running() for new in self._read(running)]
        texts = add_tokens([(new.choice.text, new.ids, bool(new.reason)) for new in news], self._decode)
        for new, (text, is_stopped) in zip(news, texts, strict=True):
            self._tell(new, text, STOP if is_stopped else new.reason)
        for number in {new.running.number: None for new in news}:
            self._see_end(self._asked[number])

    def take_progress(self) -> list[Progress]:
        """What there is to tell since the last time."""
        taken, self._progress = list(self._progress.values()), {}
        standing, metrics = self.standing, self._pipeline.get_metrics()
        standing.running, standing.waiting = self._line.running_sequences, len(self._line)
        standing.cache_blocks_used = round(metrics.cache_usage * standing.cache_blocks / 100) if self._asked else 0
        return taken

    # --- what a step has brought

    def _running(self) -> list[RunningGeneration]:
        return [self._asked[number] for number in self._line.running]

    def _read(self, running: RunningGeneration) -> Iterator[NewTokens]:
        handle = running.handle
        if not handle.can_read():
            self._see_preemption(running)
            return
        running.is_preempted = False
        for sequence, output in handle.read().items():
            choice = running.choices.get(sequence)
            if choice is None:
                index = len(running.choices)
                running.choices[sequence] = choice = RunningChoice(index, _text_of(running.sampling))
            if not choice.is_over:
                reason = _REASONS.get(output.finish_reason, "")
                yield NewTokens(running, choice, output.generated_ids, output.generated_log_probs, reason)

    def _see_preemption(self, running: RunningGeneration) -> None:
        """One that has begun gets a token in every step, unless the cache was full and it had to make room."""
        if running.handle.get_status() == genai.GenerationStatus.IGNORED:
            self._end(running.number, EngineFailed("the cache is full, and nothing could make room (genai.cache_mb)"))
        elif running.choices and not running.is_preempted:
            running.is_preempted = True
            self.standing.preemptions += 1

    def _tell(self, new: NewTokens, text: str, reason: str) -> None:
        choice, running = new.choice, new.running
        choice.tokens += len(new.ids)
        self.standing.generated_tokens += len(new.ids)
        has_logprobs = running.sampling.has_logprobs
        logprobs = new.logprobs if has_logprobs else ()
        tokens = [self._vocabulary[number] for number in new.ids] if has_logprobs else ()
        choice.is_over = bool(reason)
        progress = self._progress_of(running.number)
        if text or new.ids or reason:
            for index in running.indices(choice):
                progress.deltas.append(Delta(index, text, new.ids, logprobs, reason, tokens))

    def _see_end(self, running: RunningGeneration) -> None:
        choices = running.choices.values()
        if len(choices) == running.config.num_return_sequences and all(choice.is_over for choice in choices):
            running.handle.stop()  # where a stop string ended it, the pipeline knows of none
            self._end(running.number)
        else:
            self._line.advance(running.number, max(choice.tokens for choice in choices))

    def _end(self, number: int, failure: PenstockError | None = None) -> None:
        progress = self._progress_of(number)
        progress.failure, progress.is_over = failure, True
        self._line.remove(number)
        del self._asked[number]

    def _progress_of(self, number: int) -> Progress:
        progress = self._progress.get(number)
        if progress is None:
            self._progress[number] = progress = Progress(number)
        return progress

    # --- from a request to what the pipeline takes

    def _append(self, number: int, generation: Generation) -> None:
        sampling = generation.sampling
        ids = self._encode(generation.prompt)
        room = self.context_tokens - len(ids)
        if self.context_tokens and room < max(1, sampling.max_tokens or 1):
            raise _beyond(self.context_tokens, len(ids), sampling.max_tokens)
        asked = sampling.max_tokens if sampling.max_tokens or not self.context_tokens else room
        is_greedy = sampling.temperature < GREEDY_BELOW
        sequences = 1 if is_greedy else sampling.n
        group = self._line.append(number, generation.priority, len(ids), asked, sequences)
        config = self._config(sampling, sequences, group.max_tokens)
        self._asked[number] = RunningGeneration(number, ids, sampling, config)

    def _encode(self, prompt: Prompt) -> list[int]:
        if prompt.ids:
            unknown = next((number for number in prompt.ids if number not in self._vocabulary), None)
            if unknown is not None:
                raise InvalidRequest(f"input_ids has {unknown}, and the model has tokens up to {max(self._vocabulary)}")
            return list(prompt.ids)
        text = self._render(prompt) if prompt.messages else prompt.text
        # Bytes of a text that no number of tokens could take need not be looked at.
        if self.context_tokens and len(text) > self.context_tokens * self._longest_bytes:
            raise RequestTooLarge(
                f"a prompt of {len(text)} characters is more than {self.context_tokens} tokens (generate.max_context): "
                "send less",
                reason=CONTEXT_LENGTH,
            )
        text = text.encode("utf-8", "replace").decode()
        encoded = self._tokenizer.encode(text, add_special_tokens=not prompt.messages)
        ids: list[int] = encoded.input_ids.data.reshape(-1).tolist()
        if not ids:
            raise InvalidRequest("the prompt is empty: there is nothing to go on from")
        return ids

    def _render(self, prompt: Prompt) -> str:
        if not self.has_chat_template:
            raise InvalidRequest("the model has no chat template: send a prompt in place of messages")
        if prompt.tools and not self._has_tools:
            raise InvalidRequest("the model's chat template knows no tools: leave out 'tools'", parameter="tools")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                True,
                tools=[dict(tool) for tool in prompt.tools] or None,
                extra_context=dict(prompt.template_arguments) or None,
            )
        except Exception as error:
            raise InvalidRequest(f"the model's chat template does not take these messages: {_said(error)}") from error
        return rendered

    def _config(self, sampling: Sampling, sequences: int, max_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.min_new_tokens = min(sampling.min_tokens, max_tokens)
        config.ignore_eos = sampling.ignore_eos
        config.presence_penalty = sampling.presence_penalty
        config.frequency_penalty = sampling.frequency_penalty
        config.repetition_penalty = sampling.repetition_penalty
        config.logprobs = int(sampling.has_logprobs)
        config.do_sample = sampling.temperature >= GREEDY_BELOW
        if config.do_sample:
            config.num_return_sequences = sequences
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            config.min_p = sampling.min_p
            if sampling.top_k:
                config.top_k = sampling.top_k
            # Where nobody asks for a seed, each is another.
            config.rng_seed = random.getrandbits(32) if sampling.seed is None else sampling.seed % 2**32
        if sampling.json_schema:
            config.structured_output_config = genai.StructuredOutputConfig(json_schema=sampling.json_schema)
        try:
            config.validate()
        except Exception as error:
            raise _refused(error) from error
        return config

    # --- the runtime

    def _started(self, running: RunningGeneration) -> None:
        tokens = len(running.ids)
        self.standing.prompt_tokens += tokens
        self._progress_of(running.number).prompt_tokens = tokens

    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.decode(sequences)
        return texts

    def _cache_blocks(self, cache_mb: int) -> int:
        facts = self._facts
        if not facts.values_per_token:
            raise ConfigError("the model's files do not tell its layers and heads: this is no model that generates")
        bytes_per_token = 2 * facts.layers * facts.kv_heads * (facts.head_size + SCALES_BYTES)
        return max(1, cache_mb * MIB // (bytes_per_token * BLOCK_TOKENS))

    def _scheduler(self, has_prefix_caching: bool) -> Any:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = self.standing.cache_blocks
        config.cache_size = 0
        config.max_num_batched_tokens = self._max_batched_tokens
        config.dynamic_split_fuse = True  # a long prompt is computed in parts, and the others go on beside it
        config.enable_prefix_caching = has_prefix_caching
        return config

    def _warm_up(self) -> None:
        """The first step takes many times what the others do."""
        config = genai.GenerationConfig()
        config.max_new_tokens = 2
        self._pipeline.add_request(0, _tensor([0]), config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _properties(threads: int, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
        "sampler_num_threads": threads,
    }
    if precision in _PRECISIONS:
        found["INFERENCE_PRECISION_HINT"] = _PRECISIONS[precision]
    return found


def _precision(asked: str) -> str:
    """What the runtime computes in, where it is not told."""
    if asked != "auto":
        return asked
    return "bf16" if "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "fp32"


def _tensor(ids: Sequence[int]) -> Any:
    return ov.Tensor(np.array([ids], np.int64))


def _text_of(sampling: Sampling) -> ChoiceText:
    return ChoiceText(sampling.stop, sampling.has_stop_in_text)


def _beyond(context: int, prompt: int, answer: int | None) -> RequestTooLarge:
    wanted = f" and an answer of {answer}" if answer else ""
    return RequestTooLarge(
        f"a prompt of {prompt} tokens{wanted} is more than the model's context of {context} tokens "
        "(generate.max_context): send less, or ask for fewer",
        reason=CONTEXT_LENGTH,
    )


def _refused(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the engine does not take this request: {_said(error)}")


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
