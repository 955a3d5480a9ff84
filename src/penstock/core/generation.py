"""Requests to models that generate text, and their results: the types that task, engine and worker share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import PenstockError

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"  # why a choice ended
CONTEXT_LENGTH = "context_length_exceeded"  # the reason of a RequestTooLarge: prompt and answer exceed the context


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rules for choosing tokens and for stopping."""

    max_tokens: int | None = None  # None: as many as fit into the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1  # choices
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    has_logprobs: bool = False
    ignore_eos: bool = False
    has_stop_in_text: bool = False
    json_schema: str = ""  # the answer must be JSON that fits this schema; empty: any text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, which is either a text, token ids or chat messages; exactly one of the three fields is set."""

    text: str = ""
    ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, Any]] = ()  # formatted with the model's chat template
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    is_echoed: bool = False  # the answer begins with the prompt's text


@dataclass(frozen=True, slots=True)
class Generation:
    prompt: Prompt
    sampling: Sampling
    priority: int = 1  # 1 is the highest


@dataclass(slots=True)
class Delta:
    """The tokens that a step added to one choice."""

    choice: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str = ""  # empty: the choice continues
    token_bytes: Sequence[bytes] = ()  # of each token, if logprobs were requested


@dataclass(slots=True)
class Progress:
    """The output of one engine step for one generation request. A `failure` ends the request."""

    number: int
    deltas: list[Delta] = field(default_factory=list)
    prompt_tokens: int = 0  # set in the generation's first progress
    cached_tokens: int = -1  # prompt tokens found in the prefix cache; -1: the engine does not report them
    failure: PenstockError | None = None
    is_over: bool = False  # all choices have ended


@dataclass(slots=True)
class GenerationState:
    """The state of an engine after a step. Counters start when the block is loaded."""

    running: int = 0  # sequences
    waiting: int = 0  # generations
    cache_blocks: int = 0
    cache_blocks_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = -1  # prompt tokens found in the prefix cache; -1: the engine does not report them
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class GenerationStep:
    """The results of one step of an engine."""

    progress: Sequence[Progress]
    state: GenerationState
