"""Reads the prompts of a request: texts, token ids, or messages for the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from penstock.core.errors import InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.generation import Prompt
from penstock.core.tensors import Tensor, check_tensor, to_array, unpack_bytes
from penstock.tasks.columns import check_column
from penstock.tasks.generate.parameters import invalid_parameter, read_json

TEXT_INPUT, MESSAGES, INPUT_IDS, INPUT_LENGTHS = "text_input", "messages", "input_ids", "input_lengths"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES_BYTES = 16 * 1024 * 1024
TOOL_CHOICES = ("none", "auto", "required")


def read_prompts(
    tensor: Tensor, parameters: Mapping[str, object], lengths: Tensor | None = None, has_echo: bool = False
) -> list[Prompt]:
    """Read the prompts. `lengths`: the number of tokens of each prompt in `input_ids`."""
    if lengths is not None and tensor.name != INPUT_IDS:
        raise InvalidTensor(f"'{INPUT_LENGTHS}' can only be sent with '{INPUT_IDS}': leave out '{INPUT_LENGTHS}'")
    match tensor.name:
        case "messages":
            return [_read_chat(tensor, parameters)]
        case "input_ids":
            ids = _read_ids(tensor)
            return [
                Prompt(ids=part, is_echoed=has_echo)
                for part in ([ids] if lengths is None else _split_ids(ids, lengths))
            ]
    check_column(tensor, f"'{TEXT_INPUT}' is BYTES [n] or [n, 1]", "text")
    return [Prompt(text=_read_text(TEXT_INPUT, raw)) for raw in unpack_bytes(tensor)]


def _read_text(name: str, raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidTensor(f"input '{name}' is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text:
        raise InvalidRequest(f"input '{name}' has an empty text; send at least one character")
    return text


def _read_ids(tensor: Tensor) -> list[int]:
    if (
        tensor.datatype not in ("INT32", "INT64")
        or len(tensor.shape) > 2
        or (len(tensor.shape) == 2 and tensor.shape[0] != 1)
    ):
        raise InvalidTensor(
            f"'{INPUT_IDS}' must be INT64 or INT32 [t], the tokens of one prompt; "
            f"got {tensor.datatype} {list(tensor.shape)}"
        )
    check_tensor(tensor)
    ids: list[int] = to_array(tensor).reshape(-1).tolist()
    if not ids:
        raise InvalidRequest(f"input '{INPUT_IDS}' is empty; send at least one token")
    if min(ids) < 0:
        raise InvalidRequest(f"input '{INPUT_IDS}' has the token {min(ids)}; token ids must not be negative")
    return ids


def _split_ids(ids: list[int], tensor: Tensor) -> list[list[int]]:
    if tensor.datatype not in ("INT32", "INT64") or len(tensor.shape) != 1:
        raise InvalidTensor(f"'{INPUT_LENGTHS}' must be INT32 [p]; got {tensor.datatype} {list(tensor.shape)}")
    check_tensor(tensor)
    lengths: list[int] = to_array(tensor).tolist()
    if min(lengths, default=0) < 1 or sum(lengths) != len(ids):
        raise InvalidRequest(
            f"'{INPUT_LENGTHS}' must have numbers of at least 1 whose sum is {len(ids)}, the length of '{INPUT_IDS}'"
        )
    ends = list(accumulate(lengths))
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _read_chat(tensor: Tensor, parameters: Mapping[str, object]) -> Prompt:
    check_column(tensor, f"'{MESSAGES}' is BYTES [1], a JSON list of messages", "list of messages")
    if tensor.shape[0] != 1:
        raise InvalidRequest(f"input '{MESSAGES}' has {tensor.shape[0]} lists; send one conversation per request")
    if len(tensor.data) > MAX_MESSAGES_BYTES:
        raise RequestTooLarge(
            f"input '{MESSAGES}' has {len(tensor.data)} bytes; at most {MAX_MESSAGES_BYTES} are allowed: "
            "shorten the conversation"
        )
    try:
        given = json.loads(_read_text(MESSAGES, unpack_bytes(tensor)[0]))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"input '{MESSAGES}' is not JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"input '{MESSAGES}' must be a list with at least one message")
    messages = [_read_message(position, each) for position, each in enumerate(given)]
    kwargs = parameters.get("chat_template_kwargs")
    arguments = {} if kwargs is None else read_json("chat_template_kwargs", kwargs, dict, "a JSON object")
    return Prompt(messages=messages, tools=_read_tools(parameters), template_arguments=arguments)


def _read_message(position: int, value: object) -> Mapping[str, Any]:
    location = f"{MESSAGES}[{position}]"
    if not isinstance(value, dict):
        raise _invalid_message_error(location, "must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise _invalid_message_error(
            f"{location}.role", f"is {json.dumps(role)[:80]}; it must be one of {', '.join(ROLES)}"
        )
    found = {**value, "role": "system" if role == "developer" else role, "content": _read_content(location, value)}
    if value.get("tool_calls"):
        found["tool_calls"] = _read_calls(f"{location}.tool_calls", value["tool_calls"])
    return found


def _read_calls(location: str, value: object) -> list[Mapping[str, Any]]:
    """Return a message's tool calls with parsed arguments, because chat templates convert arguments to JSON."""
    calls: list[Mapping[str, Any]] = []
    for call in value if isinstance(value, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if call is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid_message_error(
                location, 'must be a list of {"id": …, "type": "function", "function": {"name": …, …}}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise _invalid_message_error(location, f"has arguments that are not JSON: {error}") from error
        calls.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return calls


def _invalid_message_error(location: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{location} {message}", parameter=location)


def _read_content(location: str, value: Mapping[str, Any]) -> str:
    """Return a message's content as one text, because chat templates do not accept lists of parts."""
    content = value.get("content")
    if isinstance(content, str):
        return content
    if content is None and (value.get("tool_calls") or value.get("function_call")):
        return ""
    if not isinstance(content, list):
        raise _invalid_message_error(f"{location}.content", "must be a text, or a list of parts of type text")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text" or not isinstance(text, str):
            raise _invalid_message_error(
                f"{location}.content", f"has a part of type {json.dumps(kind)[:80]}; this model takes text only"
            )
        texts.append(text)
    return "\n".join(texts)


def _read_tools(parameters: Mapping[str, object]) -> Sequence[Mapping[str, Any]]:
    """Return the request's tools that `tool_choice` allows."""
    given = parameters.get("tools")
    tools = [] if given is None else read_json("tools", given, list, "a JSON list of tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid_parameter(
                "tools", given, 'a list of {"type": "function", "function": {"name": …, "parameters": {…}}}'
            )
    choice = parameters.get("tool_choice")
    if choice is None or choice in ("auto", "required"):
        return tools
    if choice == "none":
        return []
    allowed = f'{", ".join(TOOL_CHOICES)}, or {{"type": "function", "function": {{"name": one of the tools}}}}'
    function = read_json("tool_choice", choice, dict, allowed).get("function")
    name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise invalid_parameter("tool_choice", choice, allowed)
    return chosen
