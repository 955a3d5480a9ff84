"""Requests for generated text and their answers, for both clients."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from penstock.client.messages import CallControls, make_object_array, pick_output
from penstock.core.errors import InternalError, InvalidRequest
from penstock.core.requests import Parameter
from penstock.core.tensors import Array

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}, like OpenAI's
Messages = str | Sequence[Message]  # a single text is a message of the user
Prompt = str | Sequence[str] | Sequence[int]  # one text, several texts, or one list of token ids
TEXT, INDEX, FINISH, USAGE = "text_output", "index", "finish_reason", "usage"
TOKENS, LOGPROBS, COUNTS = "token_ids", "logprobs", "counts"
WITH_TOKENS = (TEXT, INDEX, FINISH, USAGE, TOKENS, LOGPROBS, COUNTS)


class SamplingOptions(TypedDict, total=False):
    """Options for sampling tokens and for stopping; the model's default applies to options that are left out."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None  # 0: always the most likely token
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None  # number of choices
    stop: str | Sequence[str] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logprobs: bool | int | None  # the number of most likely tokens to return; the answer then contains token ids, too
    ignore_eos: bool | None
    echo: bool | None
    include_stop_str_in_output: bool | None
    response_format: Mapping[str, Any] | None  # {"type": "json_schema", …}, like OpenAI's
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class AnswerOptions(SamplingOptions, total=False):
    """Keyword arguments of `chat` and `generate`."""

    system: str | None  # system prompt of a chat
    version: str
    timeout_s: float | None  # for the whole answer
    parameters: Mapping[str, Parameter] | None  # any other parameters of the model
    priority: int | None  # 1 is the highest
    session_id: str | int | None


@dataclass(frozen=True, slots=True)
class TextUsage:
    """The number of tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # prompt tokens that were found in a cache; None: the engine does not report them

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class TextChoice:
    """One generated text. With several prompts, the choices of the first prompt come first."""

    text: str = ""
    finish_reason: str = ""  # stop, length or tool_calls; empty while text is generated
    token_ids: list[int] = field(default_factory=list)  # only if logprobs are requested
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Generated:
    """A complete answer: all choices, and the token usage."""

    choices: list[TextChoice]
    usage: TextUsage

    @property
    def text(self) -> str:
        """Return the text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        """Return the finish reason of the first choice."""
        return self.choices[0].finish_reason

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice, while an answer is streamed."""

    text: str
    index: int = 0  # the index of the choice
    finish_reason: str = ""  # empty: more text follows
    usage: TextUsage = TextUsage()  # of the whole request so far
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The arguments of `infer` for a request that generates text."""

    model: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    version: str
    timeout_s: float | None
    parameters: Mapping[str, Parameter]
    controls: CallControls


def make_chat_request(model: str, messages: Messages, options: AnswerOptions) -> TextRequest:
    given: list[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if system := options.get("system"):
        given.insert(0, {"role": "system", "content": system})
    if not given:
        raise InvalidRequest("there are no messages: give at least one message")
    return _build_request(model, {"messages": make_object_array([_to_json("messages", given)])}, options)


def make_prompt_request(model: str, prompt: Prompt, options: AnswerOptions) -> TextRequest:
    if options.get("system"):
        raise InvalidRequest("a raw prompt has no system prompt: use 'system' with chat()")
    given = [prompt] if isinstance(prompt, str) else list(prompt)
    if not given:
        raise InvalidRequest("there is no prompt: give at least one text, or one token id")
    if all(isinstance(each, str) for each in given):
        return _build_request(model, {"text_input": make_object_array(given)}, options)
    if all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in given):
        return _build_request(model, {"input_ids": np.array(given, np.int64)}, options)
    raise InvalidRequest("a prompt must be a text, a list of texts, or a list of token ids (int)")


def _build_request(model: str, inputs: Mapping[str, Array], options: AnswerOptions) -> TextRequest:
    every: Mapping[str, Any] = options
    if unknown := [name for name in every if name not in AnswerOptions.__annotations__]:
        raise TypeError(f"got an unexpected keyword argument '{unknown[0]}'")
    sampling = {name: every[name] for name in SamplingOptions.__annotations__ if every.get(name) is not None}
    parameters = {
        name: value if isinstance(value, Parameter) else _to_json(name, value) for name, value in sampling.items()
    }
    controls: CallControls = {"priority": options.get("priority"), "session_id": options.get("session_id")}
    return TextRequest(
        model,
        inputs,
        WITH_TOKENS if sampling.get(LOGPROBS) not in (None, False) else (),
        options.get("version", ""),
        options.get("timeout_s"),
        {**parameters, **(options.get("parameters") or {})},
        controls,
    )


def _to_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_to_plain)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"'{name}' cannot be written as JSON: {error}") from error


def _to_plain(value: object) -> object:
    """Convert mappings and sequences that `json` does not support to dicts and lists."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"it contains a {type(value).__name__}")


def read_deltas(outputs: Mapping[str, Array], model: str) -> Iterator[TextDelta]:
    """Yield a delta for each choice in one answer of a stream."""
    texts = pick_output(outputs, TEXT, model).ravel().tolist()
    count = len(texts)
    indexes = _read_column(outputs, INDEX, count, range(count))
    reasons = _read_column(outputs, FINISH, count, [b""] * count)
    usage = _read_usage(outputs)
    tokens, logprobs = (outputs[name].ravel().tolist() if name in outputs else [] for name in (TOKENS, LOGPROBS))
    start = 0
    for place, size in enumerate(_read_column(outputs, COUNTS, count, [0] * count)):
        end = start + size
        yield TextDelta(
            texts[place].decode(errors="replace"),
            indexes[place],
            reasons[place].decode(errors="replace"),
            usage,
            tokens[start:end],
            logprobs[start:end],
        )
        start = end


def read_answer(outputs: Mapping[str, Array], model: str) -> Generated:
    return join_deltas(read_deltas(outputs, model))


def join_deltas(deltas: Iterator[TextDelta]) -> Generated:
    choices: dict[int, TextChoice] = {}
    usage = TextUsage()
    for delta in deltas:
        choice = choices.setdefault(delta.index, TextChoice())
        choice.text += delta.text
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        usage = delta.usage
    if not choices:
        raise InternalError("the model returned no text")
    return Generated([choices[index] for index in sorted(choices)], usage)


def _read_column(outputs: Mapping[str, Array], name: str, count: int, default: Sequence[Any]) -> Sequence[Any]:
    if name not in outputs:
        return default
    found: list[Any] = outputs[name].ravel().tolist()
    if len(found) != count:
        raise InternalError(f"the model returned {len(found)} values of '{name}' for {count} texts")
    return found


def _read_usage(outputs: Mapping[str, Array]) -> TextUsage:
    found = outputs[USAGE].ravel().tolist() if USAGE in outputs else []
    if len(found) < 3:
        return TextUsage()
    return TextUsage(found[0], found[1], found[2] if found[2] >= 0 else None)
