"""What a request asks the model to go on from: texts, token ids, or messages for the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from penstock.core.errors import InvalidRequest, InvalidTensor, RequestTooLarge
from penstock.core.generation import Prompt
from penstock.core.tensors import Tensor, check_tensor, to_array, unpack_bytes
from penstock.tasks.columns import check_column
from penstock.tasks.generate.parameters import parsed, refuse

TEXT_INPUT, MESSAGES, INPUT_IDS, INPUT_LENGTHS = "text_input", "messages", "input_ids", "input_lengths"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES_BYTES = 16 * 1024 * 1024
CHOICES = ("none", "auto", "required")


def prompts_of(
    tensor: Tensor, parameters: Mapping[str, object], lengths: Tensor | None = None, has_echo: bool = False
) -> list[Prompt]:
    """`lengths`: how many tokens of `input_ids` belong to each of several prompts; only an engine knows their text."""
    if lengths is not None and tensor.name != INPUT_IDS:
        raise InvalidTensor(f"'{INPUT_LENGTHS}' is for '{INPUT_IDS}': leave it out")
    match tensor.name:
        case "messages":
            return [_chat(tensor, parameters)]
        case "input_ids":
            ids = _ids(tensor)
            return [
                Prompt(ids=part, is_echoed=has_echo) for part in ([ids] if lengths is None else _parts(ids, lengths))
            ]
    check_column(tensor, f"'{TEXT_INPUT}' is BYTES [n] or [n, 1]", "text")
    return [Prompt(text=_text(TEXT_INPUT, raw)) for raw in unpack_bytes(tensor)]


def _text(name: str, raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidTensor(f"input '{name}' is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text:
        raise InvalidRequest(f"input '{name}' has an empty text; send at least one character")
    return text


def _ids(tensor: Tensor) -> list[int]:
    if (
        tensor.datatype not in ("INT32", "INT64")
        or len(tensor.shape) > 2
        or (len(tensor.shape) == 2 and tensor.shape[0] != 1)
    ):
        raise InvalidTensor(
            f"'{INPUT_IDS}' is INT64 or INT32 [t], the tokens of one prompt; got {tensor.datatype} {list(tensor.shape)}"
        )
    check_tensor(tensor)
    ids: list[int] = to_array(tensor).reshape(-1).tolist()
    if not ids:
        raise InvalidRequest(f"input '{INPUT_IDS}' is empty; send at least one token")
    if min(ids) < 0:
        raise InvalidRequest(f"input '{INPUT_IDS}' has the token {min(ids)}; none is negative")
    return ids


def _parts(ids: list[int], tensor: Tensor) -> list[list[int]]:
    if tensor.datatype not in ("INT32", "INT64") or len(tensor.shape) != 1:
        raise InvalidTensor(f"'{INPUT_LENGTHS}' is INT32 [p]; got {tensor.datatype} {list(tensor.shape)}")
    check_tensor(tensor)
    lengths: list[int] = to_array(tensor).tolist()
    if min(lengths, default=0) < 1 or sum(lengths) != len(ids):
        raise InvalidRequest(
            f"'{INPUT_LENGTHS}' must be numbers from 1 on, in all the {len(ids)} tokens of '{INPUT_IDS}'"
        )
    ends = list(accumulate(lengths))
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _chat(tensor: Tensor, parameters: Mapping[str, object]) -> Prompt:
    check_column(tensor, f"'{MESSAGES}' is BYTES [1], a JSON list of messages", "list of messages")
    if tensor.shape[0] != 1:
        raise InvalidRequest(f"input '{MESSAGES}' has {tensor.shape[0]} lists; send one conversation a request")
    if len(tensor.data) > MAX_MESSAGES_BYTES:
        raise RequestTooLarge(
            f"input '{MESSAGES}' has {len(tensor.data)} bytes; at most {MAX_MESSAGES_BYTES} are taken"
        )
    try:
        told = json.loads(_text(MESSAGES, unpack_bytes(tensor)[0]))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"input '{MESSAGES}' is not JSON: {error}") from error
    if not isinstance(told, list) or not told:
        raise InvalidRequest(f"input '{MESSAGES}' must be a list with at least one message")
    messages = [_message(position, each) for position, each in enumerate(told)]
    kwargs = parameters.get("chat_template_kwargs")
    arguments = {} if kwargs is None else parsed("chat_template_kwargs", kwargs, dict, "a JSON object")
    return Prompt(messages=messages, tools=_tools(parameters), template_arguments=arguments)


def _message(position: int, told: object) -> Mapping[str, Any]:
    where = f"{MESSAGES}[{position}]"
    if not isinstance(told, dict):
        raise _wrong(where, "must be an object with role and content")
    role = told.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"is {json.dumps(role)[:80]}; it must be one of {', '.join(ROLES)}")
    found = {**told, "role": "system" if role == "developer" else role, "content": _content(where, told)}
    if told.get("tool_calls"):
        found["tool_calls"] = _calls(f"{where}.tool_calls", told["tool_calls"])
    return found


def _calls(where: str, told: object) -> list[Mapping[str, Any]]:
    """With arguments as what their JSON says: templates write it themselves."""
    calls: list[Mapping[str, Any]] = []
    for call in told if isinstance(told, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if call is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(where, 'must be a list of {"id": …, "type": "function", "function": {"name": …, …}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise _wrong(where, f"has arguments that are not JSON: {error}") from error
        calls.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return calls


def _wrong(where: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {message}", parameter=where)


def _content(where: str, told: Mapping[str, Any]) -> str:
    """Texts, or parts of type text, which templates know nothing of."""
    content = told.get("content")
    if isinstance(content, str):
        return content
    if content is None and (told.get("tool_calls") or told.get("function_call")):
        return ""
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "must be a text, or a list of parts of type text")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text" or not isinstance(text, str):
            raise _wrong(f"{where}.content", f"has a part of type {json.dumps(kind)[:80]}; this model takes text alone")
        texts.append(text)
    return "\n".join(texts)


def _tools(parameters: Mapping[str, object]) -> Sequence[Mapping[str, Any]]:
    """Those that the model is told of."""
    given = parameters.get("tools")
    tools = [] if given is None else parsed("tools", given, list, "a JSON list of tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refuse("tools", given, 'a list of {"type": "function", "function": {"name": …, "parameters": {…}}}')
    choice = parameters.get("tool_choice")
    if choice is None or choice in ("auto", "required"):
        return tools
    if choice == "none":
        return []
    allowed = f'{", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": one of the tools}}}}'
    function = parsed("tool_choice", choice, dict, allowed).get("function")
    name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise refuse("tool_choice", choice, allowed)
    return chosen
