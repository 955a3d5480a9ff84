"""Bodies of chat completions and completions to the request that every protocol makes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest
from penstock.core.requests import InferRequest, Parameter
from penstock.core.tensors import BYTES, Tensor, from_array, pack_bytes
from penstock.gateway.http.calls import validate
from penstock.gateway.http.oip.codec import decode_parameters
from penstock.gateway.http.openai.schemas import ChatBody, CompletionsBody, GenerationBody
from penstock.gateway.http.openai.tools import NO_TOOLS, ToolUse, tool_use

# Named alike in a body and in a request's parameters.
SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "priority",
    "session_id",
)
MESSAGES, TEXT, IDS, LENGTHS = "messages", "text_input", "input_ids", "input_lengths"
OUTPUTS = ("text_output", "index", "finish_reason", "usage")
LOGPROB_OUTPUTS = ("token_bytes", "logprobs", "counts")
MAX_LOGPROBS = 1
COMPLETION_TOKENS = 16  # where a completion's body does not say: OpenAI's
PROMPT_WORDS = "'prompt' must be a text, texts, the ids of tokens, or lists of those; none may be empty"


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A request to generate, and what its answer is to tell."""

    request: InferRequest
    is_stream: bool
    has_usage: bool  # also as a stream
    has_logprobs: bool
    top_logprobs: int
    use: ToolUse = NO_TOOLS


def read_chat(message: dict[str, Any]) -> GenerationCall:
    body = validate(ChatBody, message)
    if body.functions:
        raise InvalidRequest("'functions' is not taken any more: send 'tools'", parameter="functions")
    if set(body.modalities or ()) - {"text"}:
        raise InvalidRequest("'modalities': models here answer with text alone", parameter="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", parameter="top_logprobs")
    use = tool_use(body)
    parameters = _parameters(body, message)
    if body.max_completion_tokens is not None:
        parameters["max_tokens"] = body.max_completion_tokens
    if use.tools:
        parameters["tools"] = _json([tool.model_dump(exclude_none=True) for tool in use.tools])
    if (wanted := use.answer_format()) is not None:
        parameters["response_format"] = _json(wanted)
    if body.chat_template_kwargs:
        parameters["chat_template_kwargs"] = _json(body.chat_template_kwargs)
    tensor = Tensor(MESSAGES, BYTES, (1,), pack_bytes([orjson.dumps(body.messages)]))
    top = body.top_logprobs or 0 if body.logprobs else None
    return _generation(body, [tensor], parameters, top, use)


def read_completion(message: dict[str, Any]) -> GenerationCall:
    body = validate(CompletionsBody, message)
    if body.suffix:
        raise InvalidRequest("'suffix' is not taken: models here only go on from the prompt", parameter="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("'best_of' must be 'n': all that is generated is given", parameter="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("'echo' with 'logprobs': those of a prompt's tokens are not known", parameter="logprobs")
    parameters = _parameters(body, message)
    parameters.setdefault("max_tokens", COMPLETION_TOKENS)
    if body.echo:
        parameters["echo"] = True
    return _generation(body, _prompts(body.prompt), parameters, body.logprobs)


def check_inputs(block: BlockDescription, request: InferRequest) -> None:
    """A model has a chat where it has a chat template, and takes `messages` only then."""
    taken = {spec.name for spec in block.inputs}
    if request.inputs[0].name == MESSAGES and MESSAGES not in taken:
        raise InvalidRequest(
            f"model '{block.model}' has no chat template: ask it through /v1/completions", parameter="model"
        )


def _generation(
    body: GenerationBody,
    tensors: list[Tensor],
    parameters: dict[str, Parameter],
    top_logprobs: int | None,
    use: ToolUse = NO_TOOLS,
) -> GenerationCall:
    options, is_stream = body.stream_options, bool(body.stream)
    if options is not None and not is_stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", parameter="stream_options")
    if top_logprobs is not None:
        asking = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        if top_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(
                f"'{asking}' is {top_logprobs}: engines here tell of the chosen token alone, so that it may be 1",
                parameter=asking,
            )
        parameters["logprobs"] = 1
    outputs = [*OUTPUTS] if top_logprobs is None else [*OUTPUTS, *LOGPROB_OUTPUTS]
    request = InferRequest(body.model, tensors, outputs=outputs, parameters=parameters)
    has_usage = options is not None and bool(options.include_usage)
    return GenerationCall(request, is_stream, has_usage, top_logprobs is not None, top_logprobs or 0, use)


def _parameters(body: GenerationBody, message: Mapping[str, Any]) -> dict[str, Parameter]:
    if body.logit_bias:
        raise InvalidRequest("'logit_bias' is not taken: the engine has no such thing", parameter="logit_bias")
    found = dict(decode_parameters(body.parameters))
    for name in SCALARS:
        if (value := getattr(body, name)) is not None:
            found[name] = value
    if body.prompt_cache_key:
        found.setdefault("session_id", body.prompt_cache_key)
    if body.stop:
        found["stop"] = _json([body.stop] if isinstance(body.stop, str) else body.stop)
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        if wanted.type == "json_schema" and wanted.json_schema is None:
            raise InvalidRequest("'response_format' needs 'json_schema'", parameter="response_format")
        found["response_format"] = _json(message["response_format"])
    return found


def _prompts(prompt: Any) -> list[Tensor]:
    """One text or several, or tokens of one or of several, one behind the other."""
    if type(prompt) is str:
        prompt = [prompt]
    if type(prompt) is not list or not prompt:
        raise InvalidRequest(PROMPT_WORDS, parameter="prompt")
    if all(type(item) is str for item in prompt):
        return [Tensor(TEXT, BYTES, (len(prompt),), pack_bytes(prompt))]
    lists = [prompt] if type(prompt[0]) is int else prompt
    if not all(type(ids) is list and ids and all(type(item) is int for item in ids) for ids in lists):
        raise InvalidRequest(PROMPT_WORDS, parameter="prompt")
    ids = [item for ids in lists for item in ids]
    if not 0 <= min(ids) <= max(ids) < 2**31:
        raise InvalidRequest("'prompt': the ids of tokens are whole numbers from 0 on", parameter="prompt")
    tensors = [from_array(IDS, np.array(ids, np.int32))]
    if len(lists) > 1:
        tensors.append(from_array(LENGTHS, np.array([len(ids) for ids in lists], np.int32)))
    return tensors


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
