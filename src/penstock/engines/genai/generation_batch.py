"""Runs many generations in one pipeline; generations join and leave the pipeline between two steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openvino_genai as genai

from penstock.core.errors import ConfigError, EngineFailed, InvalidRequest, PenstockError, RequestTooLarge
from penstock.core.generation import (
    CONTEXT_LENGTH,
    LENGTH,
    STOP,
    TOOL_CALLS,
    Delta,
    Generation,
    GenerationState,
    Progress,
    Sampling,
)
from penstock.engines.genai.configs import is_greedy, make_config
from penstock.engines.genai.genai_prompts import PromptReader
from penstock.engines.genai.generation_queue import GenerationQueue, QueueLimits
from penstock.engines.genai.grammars import GrammarCheck
from penstock.engines.genai.prefixes import PrefixCache
from penstock.engines.genai.runtime import BLOCK_TOKENS, STEP_TOKENS, GenaiRuntime, error_line
from penstock.engines.genai.text_pieces import StopText, TokenText

_REASONS = {
    genai.GenerationFinishReason.STOP: STOP,
    genai.GenerationFinishReason.LENGTH: LENGTH,
    genai.GenerationFinishReason.TOOL_CALL: TOOL_CALLS,
}


@dataclass(slots=True)
class RunningChoice:
    """One token sequence in the pipeline: one choice (answer), or all choices of a request with greedy decoding."""

    index: int
    handle: Any
    pieces: TokenText
    stops: StopText
    ids: list[int] = field(default_factory=list)
    is_over: bool = False
    is_preempted: bool = False


@dataclass(slots=True)
class RunningGeneration:
    """A generation from its arrival to its end."""

    number: int
    ids: list[int]
    sampling: Sampling
    configs: list[Any]  # one per sequence
    echo: str = ""  # text with which each choice begins
    choices: list[RunningChoice] = field(default_factory=list)  # the sequences that were started

    @property
    def is_over(self) -> bool:
        return len(self.choices) == len(self.configs) and all(choice.is_over for choice in self.choices)

    def indices(self, choice: RunningChoice) -> Sequence[int]:
        """Return the indices of the choices that a sequence generates: all choices if the request is greedy."""
        return (choice.index,) if len(self.configs) == self.sampling.n else range(self.sampling.n)


@dataclass(slots=True)
class NewTokens:
    """The tokens that a step added to a choice."""

    running: RunningGeneration
    choice: RunningChoice
    ids: list[int]
    logprobs: list[float]
    reason: str


class GenerationBatch:
    """Loads a generating model, and runs its waiting generations together, step by step."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        """Load the model, which takes seconds; raise ConfigError if that fails.

        `wake` is called from another thread when the check of a generation's JSON schema is done.
        """
        self._runtime = runtime = GenaiRuntime(settings)
        self.context_tokens = _context_tokens(settings["max_context"], runtime.facts.context_tokens)
        self.state = GenerationState(cache_blocks=runtime.cache_blocks, cached_tokens=0)
        self._prefixes = PrefixCache(runtime.cache_blocks, BLOCK_TOKENS)
        self._prompts = PromptReader(runtime.tokenizer, self.context_tokens)
        self._grammars = GrammarCheck(runtime.tokenizer, max(self._prompts.vocabulary) + 1, wake)
        self._queue = GenerationQueue(
            QueueLimits(runtime.cache_blocks, BLOCK_TOKENS, settings["max_running"], STEP_TOKENS)
        )
        self._unchecked: dict[int, Generation] = {}  # generations whose schemas are being checked
        self._generations: dict[int, RunningGeneration] = {}
        self._progress: dict[int, Progress] = {}  # to be reported, by generation

    @property
    def is_busy(self) -> bool:
        return bool(self._generations) or self._runtime.is_busy

    @property
    def running(self) -> list[int]:
        return list(self._queue.running)

    def facts(self) -> dict[str, Any]:
        """Return properties of the model, such as its context length, for the engine in the worker's process."""
        return {
            "has_chat_template": self._prompts.has_chat_template,
            "context_tokens": self.context_tokens,
            "precision": self._runtime.precision,
        }

    # --- between two steps

    def add(self, number: int, generation: Generation) -> None:
        try:
            schema = generation.sampling.json_schema
            if schema and not self._grammars.is_usable(schema):
                self._unchecked[number] = generation
            else:
                self._queue_generation(number, generation)
        except PenstockError as error:
            self._progress[number] = Progress(number, failure=error, is_over=True)

    def cancel(self, number: int) -> None:
        """Stop a generation. The pipeline frees the generation's part of the cache at the start of the next step."""
        self._unchecked.pop(number, None)
        self._progress.pop(number, None)
        running = self._generations.pop(number, None)
        if running is not None and self._queue.remove(number):
            self._cancel_generation(running)

    def join(self) -> list[int]:
        """Start the waiting generations that have room, and return their numbers."""
        unchecked, self._unchecked = self._unchecked, {}
        for number, generation in unchecked.items():
            self.add(number, generation)
        joined = [group.number for group in self._queue.join()]
        for number in joined:
            running = self._generations[number]
            self._report_prompt(running)
            self._start_choice(running)
        return joined

    def step(self) -> None:
        """Run one step. If this method raises, the pipeline's state is unknown."""
        self._runtime.step()
        self.state.steps += 1
        news = [new for number in self.running for new in self._read_new_tokens(self._generations[number])]
        for new in news:
            self._report_tokens(new)
        for number in {new.running.number: None for new in news}:
            self._start_more_choices(self._generations[number])

    def take_progress(self) -> list[Progress]:
        """Return the progress since the last call, and update `state`."""
        taken, self._progress = list(self._progress.values()), {}
        state = self.state
        state.running = self._queue.running_sequences
        state.waiting = len(self._queue) + len(self._unchecked)
        state.cache_blocks_used = self._runtime.blocks_used if self._generations else 0
        return taken

    # --- the results of a step

    def _read_new_tokens(self, running: RunningGeneration) -> Iterator[NewTokens]:
        for choice in running.choices:
            if choice.is_over:
                continue
            if not choice.handle.can_read():
                self._count_preemption(running, choice)
                continue
            choice.is_preempted = False
            for output in choice.handle.read().values():
                reason = _REASONS.get(output.finish_reason, "")
                yield NewTokens(running, choice, output.generated_ids, output.generated_log_probs, reason)

    def _count_preemption(self, running: RunningGeneration, choice: RunningChoice) -> None:
        """Count a preemption: a running sequence got no token because it was moved out of the full cache."""
        if choice.handle.get_status() == genai.GenerationStatus.IGNORED:
            self._end_generation(
                running, EngineFailed("the cache is full, with nothing to preempt: raise genai.cache_mb")
            )
        elif choice.ids and not choice.is_preempted:
            choice.is_preempted = True
            self.state.preemptions += 1

    def _report_tokens(self, new: NewTokens) -> None:
        choice, running, reason = new.choice, new.running, new.reason
        text, is_stopped = choice.stops.add(choice.pieces.add(new.ids, bool(reason)), bool(reason))
        if is_stopped and not reason:
            choice.handle.stop()  # the pipeline does not know the stop strings
        reason = STOP if is_stopped else reason
        choice.ids += new.ids
        choice.is_over = bool(reason)
        self._cache_computed(running, choice)
        self.state.generated_tokens += len(new.ids)
        has_logprobs = running.sampling.has_logprobs
        logprobs = new.logprobs if has_logprobs else ()
        tokens = [self._prompts.vocabulary[number] for number in new.ids] if has_logprobs else ()
        deltas = self._progress_of(running.number).deltas
        for index in running.indices(choice):
            deltas.append(Delta(index, text, new.ids, logprobs, reason, tokens))

    def _start_more_choices(self, running: RunningGeneration) -> None:
        """Start the remaining choices after the first choice has computed the prompt, which the cache now contains."""
        self._queue.advance(running.number, max(len(choice.ids) for choice in running.choices))
        while len(running.choices) < len(running.configs) and running.number in self._generations:
            self._start_choice(running)
        if running.is_over:
            self._end_generation(running)

    def _start_choice(self, running: RunningGeneration) -> None:
        index = len(running.choices)
        try:
            handle = self._runtime.add(running.ids, running.configs[index])
        except Exception as error:  # noqa: BLE001 - native code raises any kind
            self._end_generation(running, InvalidRequest(f"the engine rejects this request: {error_line(error)}"))
            return
        sampling = running.sampling
        stops = StopText(sampling.stop, sampling.has_stop_in_text)
        running.choices.append(RunningChoice(index, handle, self._prompts.new_decoder(), stops))

    def _end_generation(self, running: RunningGeneration, failure: PenstockError | None = None) -> None:
        if failure is not None:
            self._cancel_generation(running)
        progress = self._progress_of(running.number)
        progress.failure, progress.is_over = failure, True
        self._queue.remove(running.number)
        self._generations.pop(running.number, None)

    def _cancel_generation(self, running: RunningGeneration) -> None:
        for choice in running.choices:
            if not choice.is_over:
                choice.is_over = True
                choice.handle.cancel()
                self._cache_computed(running, choice)

    # --- progress of prompts

    def _report_prompt(self, running: RunningGeneration) -> None:
        ids, progress = running.ids, self._progress_of(running.number)
        if running.echo:
            progress.deltas += [Delta(index, running.echo) for index in range(running.sampling.n)]
        progress.prompt_tokens = len(ids)
        self.state.prompt_tokens += len(ids)
        progress.cached_tokens = self._prefixes.find(ids)
        self.state.cached_tokens += progress.cached_tokens

    def _cache_computed(self, running: RunningGeneration, choice: RunningChoice) -> None:
        """Add tokens to the prefix cache: the prompt after its first new token, and the answer when it is complete."""
        if not choice.ids:
            return
        if choice.is_over:
            self._prefixes.add([*running.ids, *choice.ids[:-1]], is_over=True)
        elif len(choice.ids) == 1:
            self._prefixes.add(running.ids)

    def _progress_of(self, number: int) -> Progress:
        progress = self._progress.get(number)
        if progress is None:
            self._progress[number] = progress = Progress(number)
        return progress

    # --- the queue

    def _queue_generation(self, number: int, generation: Generation) -> None:
        sampling = generation.sampling
        ids = self._prompts.read(generation.prompt)
        requested = sampling.max_tokens
        if self.context_tokens:
            room = self.context_tokens - len(ids)
            if room < (requested or 1):
                raise _too_long_error(self.context_tokens, len(ids), requested)
            requested = requested or room
        sequences = 1 if is_greedy(sampling) else sampling.n
        most = self._queue.most_tokens(len(ids), requested, sequences)
        configs = [make_config(sampling, most, choice) for choice in range(sequences)]
        self._queue.append(number, generation.priority, len(ids), sequences)
        echo = self._prompts.decode(ids) if generation.prompt.is_echoed else ""
        self._generations[number] = RunningGeneration(number, ids, sampling, configs, echo)


def _context_tokens(requested: int, model_limit: int) -> int:
    """Return the maximum tokens of prompt and answer: the requested limit, or the model's; 0 if neither is known."""
    if model_limit and requested > model_limit:
        raise ConfigError(
            f"generate.max_context is {requested}, but the model's context is {model_limit} tokens: "
            "set at most that, or auto"
        )
    return requested or model_limit


def _too_long_error(context: int, prompt: int, answer: int | None) -> RequestTooLarge:
    length = f"{prompt} tokens" if prompt < context else f"{context} tokens or more"
    wanted = f" and an answer of {answer}" if answer else ""
    return RequestTooLarge(
        f"a prompt of {length}{wanted} is more than the model's context of {context} tokens "
        "(generate.max_context): shorten the prompt, or lower max_tokens",
        reason=CONTEXT_LENGTH,
    )
