"""Tools: what a request says of them, and the calls in what a model writes."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.core.errors import InvalidRequest
from penstock.gateway.http.openai.schemas import ChatBody, Tool

BEGIN, END = "<tool_call>", "</tool_call>"  # around JSON, as Hermes, Qwen and SmolLM2 write it
NAME, ARGUMENTS = "name", "arguments"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an answer may use tools."""

    tools: Sequence[Tool] = ()  # those that the model is told of; none: it has none
    is_forced: bool = False  # the answer is one call, and nothing is around it
    is_single: bool = False  # at most one call is wanted

    def answer_format(self) -> dict[str, Any] | None:
        """What an answer must be that is forced to call."""
        if not self.is_forced:
            return None
        calls = [_call_schema(tool) for tool in self.tools]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "json_schema", "json_schema": {"name": "tool_calls", "schema": schema}}


NO_TOOLS = ToolUse()


def tool_use(body: ChatBody) -> ToolUse:
    tools, choice = body.tools or [], body.tool_choice
    is_single = body.parallel_tool_calls is False
    if choice is not None and not tools and choice != "none":
        raise InvalidRequest("'tool_choice' needs 'tools'", parameter="tool_choice")
    if choice == "none" or not tools:
        return NO_TOOLS
    if choice is None or choice == "auto":
        return ToolUse(tools, is_single=is_single)
    if choice == "required":
        return ToolUse(tools, is_forced=True)
    name = _named(choice)
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise InvalidRequest(f"'tool_choice': no tool has the name '{name[:80]}'", parameter="tool_choice")
    return ToolUse(named, is_forced=True)


def _named(choice: Any) -> str:
    function = choice.get("function") if type(choice) is dict and choice.get("type") == "function" else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise InvalidRequest(
            "'tool_choice' must be none, auto, required or {'type': 'function', 'function': {'name': …}}",
            parameter="tool_choice",
        )
    return name


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {NAME: {"const": tool.function.name}, ARGUMENTS: tool.function.parameters or {"type": "object"}},
        "required": [NAME, ARGUMENTS],
        "additionalProperties": False,
    }


class CallReader:
    """Takes the calls out of one answer's text, as it comes. What only looks like a call stays text."""

    def __init__(self, use: ToolUse) -> None:
        self._is_forced = use.is_forced
        self._is_single = use.is_single
        self._is_inside = use.is_forced
        self._held = ""  # of a call that is not whole, or of what may be the beginning of one
        self._given: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.count = 0  # of the calls so far

    def read(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that are to be given now."""
        self._held += text
        while self._pass_call(is_last) if self._is_inside else self._pass_text(is_last):
            pass
        given, calls = "".join(self._given), self._calls
        self._given, self._calls = [], []
        return given, calls

    def _pass_text(self, is_last: bool) -> bool:
        """Whether a call begins behind it. Blanks before a call, and behind the last, are nobody's."""
        text, begin, rest = self._held.partition(BEGIN)
        if begin:
            self._given.append(text.rstrip())
            self._is_inside = True
        elif is_last:
            self._given.append(text.rstrip() if self.count else text)
        else:
            end = len(text) - _open_end(text)
            self._given.append(text[:end])
            rest = text[end:]
        self._held = rest
        return self._is_inside

    def _pass_call(self, is_last: bool) -> bool:
        """Whether it is whole."""
        inside, end, rest = (self._held, "", "") if self._is_forced else self._held.partition(END)
        if not end and not is_last:
            return False
        calls = _read_calls(inside)
        if calls:
            self._add(calls)
        else:
            self._given.append(inside if self._is_forced else f"{BEGIN}{inside}{end}")
        self._held = rest
        self._is_inside = False
        return True

    def _add(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            if self._is_single and self.count:
                return
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            function = {NAME: name, ARGUMENTS: arguments}
            self._calls.append({"id": call_id, "type": "function", "function": function})
            self.count += 1


def _open_end(text: str) -> int:
    """How many of its last characters may belong to a call, with the blanks before them."""
    size = next((size for size in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:size])), 0)
    return len(text) - len(text[: len(text) - size].rstrip())


def _read_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments of one call, or of a list of them; none where it is anything else."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return []
    calls: list[tuple[str, str]] = []
    for call in found if type(found) is list else [found]:
        if type(call) is not dict or type(call.get(NAME)) is not str:
            return []
        arguments = call.get(ARGUMENTS, {})
        calls.append((call[NAME], arguments if type(arguments) is str else orjson.dumps(arguments).decode()))
    return calls
