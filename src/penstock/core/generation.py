"""What is asked of a model that generates text, and what it gives: what task, engine and worker share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import PenstockError

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"  # why a choice has ended
CONTEXT_LENGTH = "context_length_exceeded"  # why a request was too large: its prompt, or that and its answer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when that ends."""

    max_tokens: int | None = None  # None: as many as there is room for
    min_tokens: int = 0
    temperature: float = 1.0  # 0: always the likeliest
    top_p: float = 1.0
    top_k: int = 0  # 0: all
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
    json_schema: str = ""  # the answer is JSON that fits it; empty: any text


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of text, ids and messages."""

    text: str = ""
    ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, Any]] = ()  # put into the model's own chat template
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    is_echoed: bool = False  # the text of its ids comes before what is generated


@dataclass(frozen=True, slots=True)
class Generation:
    prompt: Prompt
    sampling: Sampling
    priority: int = 1  # 1 is the highest


@dataclass(slots=True)
class Delta:
    """What one choice has got in a step."""

    choice: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str = ""  # empty: it goes on
    token_bytes: Sequence[bytes] = ()  # of each token, where logprobs are asked for


@dataclass(slots=True)
class Progress:
    """What a generation has got in a step; with `failure` it is over."""

    number: int
    deltas: list[Delta] = field(default_factory=list)
    prompt_tokens: int = 0  # told with the first
    cached_tokens: int = -1  # of the prompt, that were computed before; -1: the engine does not tell
    failure: PenstockError | None = None
    is_over: bool = False  # all its choices have ended


@dataclass(slots=True)
class GenerationStanding:
    """How an engine is after a step. What counts up counts since the block was loaded."""

    running: int = 0  # sequences
    waiting: int = 0  # generations
    cache_blocks: int = 0
    cache_blocks_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = -1  # of those, found in the prefix cache; -1: the engine does not tell
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class GenerationStep:
    """All that a step has brought."""

    progress: Sequence[Progress]
    standing: GenerationStanding
