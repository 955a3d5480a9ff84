"""Conversion of the bodies of chat completions and completions to the internal request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from penstock.core.blocks import BlockDescription
from penstock.core.errors import InvalidRequest
from penstock.core.requests import InferRequest, Parameter
from penstock.core.tensors import BYTES, Tensor, from_array, pack_bytes
from penstock.gateway.http_calls import validate
from penstock.gateway.oip.rest_codec import decode_parameters
from penstock.gateway.openai.openai_schemas import ChatBody, CompletionsBody, GenerationBody
from penstock.gateway.openai.tools import NO_TOOLS, ToolUse, read_tool_use

# Keys of a body that are parameters of the request under the same name.
SCALAR_KEYS = (
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
COMPLETION_TOKENS = 16  # the default of max_tokens in OpenAI's completions
PROMPT_ERROR = "'prompt' must be a text, a list of texts, token ids, or lists of token ids; none may be empty"


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A request to generate text, and the options of its answer."""

    request: InferRequest
    is_stream: bool
    has_usage: bool  # the stream ends with an event that has `usage`
    has_logprobs: bool
    top_logprobs: int
    tool_use: ToolUse = NO_TOOLS


def read_chat(message: dict[str, Any]) -> GenerationCall:
    body = validate(ChatBody, message)
    if body.functions:
        raise InvalidRequest("'functions' is not supported: send 'tools'", parameter="functions")
    if set(body.modalities or ()) - {"text"}:
        raise InvalidRequest("'modalities' may only have 'text'", parameter="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", parameter="top_logprobs")
    use = read_tool_use(body)
    parameters = _read_parameters(body, message)
    if body.max_completion_tokens is not None:
        parameters["max_tokens"] = body.max_completion_tokens
    if use.tools:
        parameters["tools"] = _to_json([tool.model_dump(exclude_none=True) for tool in use.tools], "tools")
    if (wanted := use.answer_format()) is not None:
        parameters["response_format"] = _to_json(wanted, "tools")
    if body.chat_template_kwargs:
        parameters["chat_template_kwargs"] = _to_json(body.chat_template_kwargs, "chat_template_kwargs")
    tensor = Tensor(MESSAGES, BYTES, (1,), pack_bytes([_to_json(body.messages, "messages").encode()]))
    top = body.top_logprobs or 0 if body.logprobs else None
    return _make_generation(body, [tensor], parameters, top, use)


def read_completion(message: dict[str, Any]) -> GenerationCall:
    body = validate(CompletionsBody, message)
    if body.suffix:
        raise InvalidRequest("'suffix' is not supported: leave it out", parameter="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("'best_of' must equal 'n': all generated choices are returned", parameter="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "'echo' with 'logprobs' is not supported: there are no logprobs of the prompt", parameter="logprobs"
        )
    parameters = _read_parameters(body, message)
    parameters.setdefault("max_tokens", COMPLETION_TOKENS)
    if body.echo:
        parameters["echo"] = True
    return _make_generation(body, _make_prompt_tensors(body.prompt), parameters, body.logprobs)


def check_inputs(block: BlockDescription, request: InferRequest) -> None:
    """Raise InvalidRequest for a chat if the model has no chat template."""
    taken = {spec.name for spec in block.inputs}
    if request.inputs[0].name == MESSAGES and MESSAGES not in taken:
        raise InvalidRequest(f"model '{block.model}' has no chat template: use /v1/completions", parameter="model")


def _make_generation(
    body: GenerationBody,
    tensors: list[Tensor],
    parameters: dict[str, Parameter],
    top_logprobs: int | None,
    tool_use: ToolUse = NO_TOOLS,
) -> GenerationCall:
    options, is_stream = body.stream_options, bool(body.stream)
    if options is not None and not is_stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", parameter="stream_options")
    if top_logprobs is not None:
        asking = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        if top_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(
                f"'{asking}' is {top_logprobs}, but engines report only the chosen token: use 0 or 1",
                parameter=asking,
            )
        parameters["logprobs"] = 1
    outputs = [*OUTPUTS] if top_logprobs is None else [*OUTPUTS, *LOGPROB_OUTPUTS]
    request = InferRequest(body.model, tensors, outputs=outputs, parameters=parameters)
    has_usage = options is not None and bool(options.include_usage)
    return GenerationCall(request, is_stream, has_usage, top_logprobs is not None, top_logprobs or 0, tool_use)


def _read_parameters(body: GenerationBody, message: Mapping[str, Any]) -> dict[str, Parameter]:
    if body.logit_bias:
        raise InvalidRequest("'logit_bias' is not supported: leave it out", parameter="logit_bias")
    found = dict(decode_parameters(body.parameters))
    for name in SCALAR_KEYS:
        if (value := getattr(body, name)) is not None:
            found[name] = value
    if body.prompt_cache_key:
        found.setdefault("session_id", body.prompt_cache_key)
    if body.stop:
        found["stop"] = _to_json([body.stop] if isinstance(body.stop, str) else body.stop, "stop")
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        if wanted.type == "json_schema" and wanted.json_schema is None:
            raise InvalidRequest("'response_format' needs 'json_schema'", parameter="response_format")
        found["response_format"] = _to_json(message["response_format"], "response_format")
    return found


def _make_prompt_tensors(prompt: Any) -> list[Tensor]:
    """Return a prompt's tensors: texts, or the token ids of all prompts in one list, with their lengths."""
    if type(prompt) is str:
        prompt = [prompt]
    if type(prompt) is not list or not prompt:
        raise InvalidRequest(PROMPT_ERROR, parameter="prompt")
    if all(type(item) is str for item in prompt):
        return [Tensor(TEXT, BYTES, (len(prompt),), pack_bytes(prompt))]
    lists = [prompt] if type(prompt[0]) is int else prompt
    if not all(type(ids) is list and ids and all(type(item) is int for item in ids) for ids in lists):
        raise InvalidRequest(PROMPT_ERROR, parameter="prompt")
    ids = [item for ids in lists for item in ids]
    if not 0 <= min(ids) <= max(ids) < 2**31:
        raise InvalidRequest("'prompt': token ids must be whole numbers from 0 to 2^31 - 1", parameter="prompt")
    tensors = [from_array(IDS, np.array(ids, np.int32))]
    if len(lists) > 1:
        tensors.append(from_array(LENGTHS, np.array([len(ids) for ids in lists], np.int32)))
    return tensors


def _to_json(value: object, name: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:  # orjson reads more deeply nested JSON than it can write
        raise InvalidRequest(f"'{name}' cannot be written as JSON: {error}", parameter=name) from error
