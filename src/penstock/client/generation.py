"""What is asked of models that generate text to a request, and its answers to texts: what both clients share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from penstock.client.messages import CallControls, objects, pick_output
from penstock.core.errors import InternalError, InvalidRequest
from penstock.core.requests import Parameter
from penstock.core.tensors import Array

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}, as OpenAI's
Messages = str | Sequence[Message]  # a text alone is the user's
Prompt = str | Sequence[str] | Sequence[int]  # one text, several, or one as tokens
TEXT, INDEX, FINISH, USAGE = "text_output", "index", "finish_reason", "usage"
TOKENS, LOGPROBS, COUNTS = "token_ids", "logprobs", "counts"
WITH_TOKENS = (TEXT, INDEX, FINISH, USAGE, TOKENS, LOGPROBS, COUNTS)


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen and when that ends; what is not given is as the model has it."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None  # 0: always the likeliest
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None  # choices
    stop: str | Sequence[str] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logprobs: bool | int | None  # tells the tokens, too
    ignore_eos: bool | None
    echo: bool | None
    include_stop_str_in_output: bool | None
    response_format: Mapping[str, Any] | None  # {"type": "json_schema", …}, as OpenAI's
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class AnswerOptions(SamplingOptions, total=False):
    """Keyword arguments of `chat` and `generate`."""

    system: str | None  # of a chat: what comes before its messages
    version: str
    timeout_s: float | None  # of the whole answer
    parameters: Mapping[str, Parameter] | None  # further ones
    priority: int | None  # 1 is the highest
    session_id: str | int | None


@dataclass(frozen=True, slots=True)
class TextUsage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt's, found in a cache; None: the engine does not tell

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class TextChoice:
    """One answer; of several prompts, those of the first come first."""

    text: str = ""
    finish_reason: str = ""  # stop, length or tool_calls; empty while it goes on
    token_ids: list[int] = field(default_factory=list)  # where logprobs are asked for
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole answer."""

    choices: list[TextChoice]
    usage: TextUsage

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one choice has got."""

    text: str
    index: int = 0  # of the choice
    finish_reason: str = ""  # empty: it goes on
    usage: TextUsage = TextUsage()  # so far, of the whole request
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextQuestion:
    """A request for text, as `infer` takes it."""

    model: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    version: str
    timeout_s: float | None
    parameters: Mapping[str, Parameter]
    controls: CallControls


def ask_chat(model: str, messages: Messages, options: AnswerOptions) -> TextQuestion:
    given: list[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if system := options.get("system"):
        given.insert(0, {"role": "system", "content": system})
    if not given:
        raise InvalidRequest("there are no messages: give at least one")
    return _ask(model, {"messages": objects([_json("messages", given)])}, options)


def ask_prompt(model: str, prompt: Prompt, options: AnswerOptions) -> TextQuestion:
    if options.get("system"):
        raise InvalidRequest("a prompt goes as it is: 'system' is for chat()")
    given = [prompt] if isinstance(prompt, str) else list(prompt)
    if not given:
        raise InvalidRequest("there is no prompt: give at least one text, or one token")
    if all(isinstance(each, str) for each in given):
        return _ask(model, {"text_input": objects(given)}, options)
    if all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in given):
        return _ask(model, {"input_ids": np.array(given, np.int64)}, options)
    raise InvalidRequest("a prompt is a text, a list of texts, or a list of tokens (int)")


def _ask(model: str, inputs: Mapping[str, Array], options: AnswerOptions) -> TextQuestion:
    every: Mapping[str, Any] = options
    if unknown := [name for name in every if name not in AnswerOptions.__annotations__]:
        raise TypeError(f"got an unexpected keyword argument '{unknown[0]}'")
    sampling = {name: every[name] for name in SamplingOptions.__annotations__ if every.get(name) is not None}
    parameters = {
        name: value if isinstance(value, Parameter) else _json(name, value) for name, value in sampling.items()
    }
    controls: CallControls = {"priority": options.get("priority"), "session_id": options.get("session_id")}
    return TextQuestion(
        model,
        inputs,
        WITH_TOKENS if sampling.get(LOGPROBS) not in (None, False) else (),
        options.get("version", ""),
        options.get("timeout_s"),
        {**parameters, **(options.get("parameters") or {})},
        controls,
    )


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"'{name}' cannot be written as JSON: {error}") from error


def _plain(value: object) -> object:
    """What stands for mappings and sequences that JSON does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def read_deltas(outputs: Mapping[str, Array], model: str) -> Iterator[TextDelta]:
    """What one answer of a stream has, a delta for each choice."""
    texts = pick_output(outputs, TEXT, model).ravel().tolist()
    count = len(texts)
    indexes = _column(outputs, INDEX, count, range(count))
    reasons = _column(outputs, FINISH, count, [b""] * count)
    usage = _usage(outputs)
    tokens, logprobs = (outputs[name].ravel().tolist() if name in outputs else [] for name in (TOKENS, LOGPROBS))
    start = 0
    for place, size in enumerate(_column(outputs, COUNTS, count, [0] * count)):
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


def read_whole(outputs: Mapping[str, Array], model: str) -> Generated:
    return joined(read_deltas(outputs, model))


def joined(deltas: Iterator[TextDelta]) -> Generated:
    """The whole answer of which these are the parts."""
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
        raise InternalError("the model gave no text at all")
    return Generated([choices[index] for index in sorted(choices)], usage)


def _column(outputs: Mapping[str, Array], name: str, count: int, otherwise: Sequence[Any]) -> Sequence[Any]:
    if name not in outputs:
        return otherwise
    found: list[Any] = outputs[name].ravel().tolist()
    if len(found) != count:
        raise InternalError(f"the model gave {len(found)} of '{name}' for {count} texts")
    return found


def _usage(outputs: Mapping[str, Array]) -> TextUsage:
    found = outputs[USAGE].ravel().tolist() if USAGE in outputs else []
    if len(found) < 3:
        return TextUsage()
    return TextUsage(found[0], found[1], found[2] if found[2] >= 0 else None)
