"""What is generated just now: generations join and leave between two steps of the pipeline."""

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
    GenerationStanding,
    Progress,
    Sampling,
)
from penstock.engines.genai.configs import is_greedy, make_config
from penstock.engines.genai.grammars import GrammarCheck
from penstock.engines.genai.line import GenerationLine, LineLimits
from penstock.engines.genai.pieces import StopText, TokenText
from penstock.engines.genai.prefixes import PrefixCache
from penstock.engines.genai.prompts import PromptReader
from penstock.engines.genai.runtime import BLOCK_TOKENS, GenaiRuntime, said

_REASONS = {
    genai.GenerationFinishReason.STOP: STOP,
    genai.GenerationFinishReason.LENGTH: LENGTH,
    genai.GenerationFinishReason.TOOL_CALL: TOOL_CALLS,
}


@dataclass(slots=True)
class RunningChoice:
    """One sequence of the pipeline's."""

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
    configs: list[Any]  # of each sequence
    echo: str = ""  # what each choice begins with
    choices: list[RunningChoice] = field(default_factory=list)  # those that the pipeline has

    @property
    def is_over(self) -> bool:
        return len(self.choices) == len(self.configs) and all(choice.is_over for choice in self.choices)

    def indices(self, choice: RunningChoice) -> Sequence[int]:
        """Which of the choices asked for it is: the likeliest is the same for all."""
        return (choice.index,) if len(self.configs) == self.sampling.n else range(self.sampling.n)


@dataclass(slots=True)
class NewTokens:
    """What a step has brought for a choice."""

    running: RunningGeneration
    choice: RunningChoice
    ids: list[int]
    logprobs: list[float]
    reason: str


class GenerationBatch:
    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        """Loads the model, which takes seconds; raises ConfigError. `wake` is called when there is something to join,
        though nobody has sent anything."""
        self._runtime = runtime = GenaiRuntime(settings)
        self.context_tokens = _context_tokens(settings["max_context"], runtime.facts.context_tokens)
        has_prefixes = settings["prefix_caching"]
        self.standing = GenerationStanding(cache_blocks=runtime.cache_blocks, cached_tokens=0 if has_prefixes else -1)
        self._prefixes = PrefixCache(runtime.cache_blocks, BLOCK_TOKENS) if has_prefixes else None
        self._prompts = PromptReader(runtime.tokenizer, self.context_tokens)
        self._grammars = GrammarCheck(runtime.tokenizer, max(self._prompts.vocabulary) + 1, wake)
        self._line = GenerationLine(
            LineLimits(runtime.cache_blocks, BLOCK_TOKENS, settings["max_running"], settings["max_batched_tokens"])
        )
        self._unchecked: dict[int, Generation] = {}  # their schemas are being looked at
        self._asked: dict[int, RunningGeneration] = {}
        self._progress: dict[int, Progress] = {}  # what is to be told

    @property
    def is_busy(self) -> bool:
        return bool(self._asked) or self._runtime.is_busy

    @property
    def running(self) -> list[int]:
        return list(self._line.running)

    def facts(self) -> dict[str, Any]:
        """What the engine is told of the model."""
        return {
            "has_chat_template": self._prompts.has_chat_template,
            "context_tokens": self.context_tokens,
            "precision": self._runtime.precision,
        }

    # --- between two steps

    def add(self, number: int, generation: Generation) -> None:
        try:
            schema = generation.sampling.json_schema
            if schema and not self._grammars.look(schema):
                self._unchecked[number] = generation
            else:
                self._append(number, generation)
        except PenstockError as error:
            self._progress[number] = Progress(number, failure=error, is_over=True)

    def cancel(self, number: int) -> None:
        """What it had of the cache is free when the next step begins: the pipeline leaves it out there."""
        self._unchecked.pop(number, None)
        self._progress.pop(number, None)
        running = self._asked.pop(number, None)
        if running is not None and self._line.remove(number):
            self._cancel(running)

    def join(self) -> list[int]:
        """Hands those to the pipeline for which there is room now. Returns their numbers."""
        unchecked, self._unchecked = self._unchecked, {}
        for number, generation in unchecked.items():
            self.add(number, generation)
        joined = [group.number for group in self._line.join()]
        for number in joined:
            running = self._asked[number]
            self._tell_prompt(running)
            self._start_choice(running)
        return joined

    def step(self) -> None:
        """May raise anything; then nothing can be said of what the pipeline has."""
        self._runtime.step()
        self.standing.steps += 1
        news = [new for number in self.running for new in self._read(self._asked[number])]
        for new in news:
            self._tell(new)
        for number in {new.running.number: None for new in news}:
            self._go_on(self._asked[number])

    def take_progress(self) -> list[Progress]:
        """What there is to tell since the last time."""
        taken, self._progress = list(self._progress.values()), {}
        standing = self.standing
        standing.running = self._line.running_sequences
        standing.waiting = len(self._line) + len(self._unchecked)
        standing.cache_blocks_used = self._runtime.blocks_used if self._asked else 0
        return taken

    # --- what a step has brought

    def _read(self, running: RunningGeneration) -> Iterator[NewTokens]:
        for choice in running.choices:
            if choice.is_over:
                continue
            if not choice.handle.can_read():
                self._see_preemption(running, choice)
                continue
            choice.is_preempted = False
            for output in choice.handle.read().values():
                reason = _REASONS.get(output.finish_reason, "")
                yield NewTokens(running, choice, output.generated_ids, output.generated_log_probs, reason)

    def _see_preemption(self, running: RunningGeneration, choice: RunningChoice) -> None:
        """One that has begun gets a token in every step, unless the cache was full and it had to make room."""
        if choice.handle.get_status() == genai.GenerationStatus.IGNORED:
            self._end(running, EngineFailed("the cache is full, and nothing could make room (genai.cache_mb)"))
        elif choice.ids and not choice.is_preempted:
            choice.is_preempted = True
            self.standing.preemptions += 1

    def _tell(self, new: NewTokens) -> None:
        choice, running, reason = new.choice, new.running, new.reason
        text, is_stopped = choice.stops.add(choice.pieces.add(new.ids, bool(reason)), bool(reason))
        if is_stopped and not reason:
            choice.handle.stop()  # the pipeline knows nothing of stop strings
        reason = STOP if is_stopped else reason
        choice.ids += new.ids
        choice.is_over = bool(reason)
        self._note_computed(running, choice)
        self.standing.generated_tokens += len(new.ids)
        has_logprobs = running.sampling.has_logprobs
        logprobs = new.logprobs if has_logprobs else ()
        tokens = [self._prompts.vocabulary[number] for number in new.ids] if has_logprobs else ()
        deltas = self._progress_of(running.number).deltas
        for index in running.indices(choice):
            deltas.append(Delta(index, text, new.ids, logprobs, reason, tokens))

    def _go_on(self, running: RunningGeneration) -> None:
        """Its first sequence has computed the prompt: the others find it in the cache."""
        self._line.advance(running.number, max(len(choice.ids) for choice in running.choices))
        while len(running.choices) < len(running.configs) and running.number in self._asked:
            self._start_choice(running)
        if running.is_over:
            self._end(running)

    def _start_choice(self, running: RunningGeneration) -> None:
        index = len(running.choices)
        try:
            handle = self._runtime.add(running.ids, running.configs[index])
        except Exception as error:  # noqa: BLE001 - of any kind, as native code throws
            self._end(running, InvalidRequest(f"the engine does not take this request: {said(error)}"))
            return
        sampling = running.sampling
        stops = StopText(sampling.stop, sampling.has_stop_in_text)
        running.choices.append(RunningChoice(index, handle, self._prompts.new_text(), stops))

    def _end(self, running: RunningGeneration, failure: PenstockError | None = None) -> None:
        if failure is not None:
            self._cancel(running)
        progress = self._progress_of(running.number)
        progress.failure, progress.is_over = failure, True
        self._line.remove(running.number)
        self._asked.pop(running.number, None)

    def _cancel(self, running: RunningGeneration) -> None:
        for choice in running.choices:
            if not choice.is_over:
                choice.is_over = True
                choice.handle.cancel()
                self._note_computed(running, choice)

    # --- what is told of prompts

    def _tell_prompt(self, running: RunningGeneration) -> None:
        ids, progress = running.ids, self._progress_of(running.number)
        if running.echo:
            progress.deltas += [Delta(index, running.echo) for index in range(running.sampling.n)]
        progress.prompt_tokens = len(ids)
        self.standing.prompt_tokens += len(ids)
        if self._prefixes is not None:
            progress.cached_tokens = self._prefixes.find(ids)
            self.standing.cached_tokens += progress.cached_tokens

    def _note_computed(self, running: RunningGeneration, choice: RunningChoice) -> None:
        """A prompt can be found by others from the first token on, and what came after it at the end."""
        if self._prefixes is None or not choice.ids:
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

    # --- into the line

    def _append(self, number: int, generation: Generation) -> None:
        sampling = generation.sampling
        ids = self._prompts.read(generation.prompt)
        asked = sampling.max_tokens
        if self.context_tokens:
            room = self.context_tokens - len(ids)
            if room < (asked or 1):
                raise _beyond(self.context_tokens, len(ids), asked)
            asked = asked or room
        sequences = 1 if is_greedy(sampling) else sampling.n
        most = self._line.most_tokens(len(ids), asked, sequences)
        configs = [make_config(sampling, most, choice) for choice in range(sequences)]
        self._line.append(number, generation.priority, len(ids), sequences)
        echo = self._prompts.text_of(ids) if generation.prompt.is_echoed else ""
        self._asked[number] = RunningGeneration(number, ids, sampling, configs, echo)


def _context_tokens(asked: int, of_model: int) -> int:
    """0: nobody says."""
    if of_model and asked > of_model:
        raise ConfigError(
            f"generate.max_context is {asked}, and the model was made for {of_model} tokens: say so, or auto"
        )
    return asked or of_model


def _beyond(context: int, prompt: int, answer: int | None) -> RequestTooLarge:
    told = f"{prompt} tokens" if prompt < context else f"{context} tokens or more"
    wanted = f" and an answer of {answer}" if answer else ""
    return RequestTooLarge(
        f"a prompt of {told}{wanted} is more than the model's context of {context} tokens "
        "(generate.max_context): send less, or ask for fewer",
        reason=CONTEXT_LENGTH,
    )
