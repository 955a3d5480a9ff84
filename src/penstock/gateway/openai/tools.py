"""Tools: the choice of tools in a request, and the tool calls in generated text."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.core.errors import InvalidRequest
from penstock.gateway.openai.openai_schemas import ChatBody, Tool

BEGIN, END = "<tool_call>", "</tool_call>"  # around JSON, as Hermes, Qwen and SmolLM2 write it
NAME, ARGUMENTS = "name", "arguments"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, and whether the answer must call a tool."""

    tools: Sequence[Tool] = ()  # the tools in the prompt
    is_forced: bool = False  # the answer must be exactly one call, without other text
    is_single: bool = False  # at most one call is returned

    def answer_format(self) -> dict[str, Any] | None:
        """Return the `response_format` of a forced call, or None."""
        if not self.is_forced:
            return None
        calls = [_make_call_schema(tool) for tool in self.tools]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "json_schema", "json_schema": {"name": "tool_calls", "schema": schema}}


NO_TOOLS = ToolUse()


def read_tool_use(body: ChatBody) -> ToolUse:
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
    name = _read_chosen_name(choice)
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise InvalidRequest(f"'tool_choice': no tool has the name '{name[:80]}'", parameter="tool_choice")
    return ToolUse(named, is_forced=True)


def _read_chosen_name(choice: Any) -> str:
    function = choice.get("function") if type(choice) is dict and choice.get("type") == "function" else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise InvalidRequest(
            "'tool_choice' must be none, auto, required or {'type': 'function', 'function': {'name': …}}",
            parameter="tool_choice",
        )
    return name


def _make_call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {NAME: {"const": tool.function.name}, ARGUMENTS: tool.function.parameters or {"type": "object"}},
        "required": [NAME, ARGUMENTS],
        "additionalProperties": False,
    }


class CallReader:
    """Extracts the tool calls from one choice's text as it is generated. Text that only resembles a call stays text."""

    def __init__(self, tool_use: ToolUse) -> None:
        self._is_forced = tool_use.is_forced
        self._is_single = tool_use.is_single
        self._is_inside = tool_use.is_forced
        self._held = ""  # text of an incomplete call, or text that may start a call
        self._emitted: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.count = 0  # calls so far

    def read(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add generated text, and return the text and the calls that are complete now."""
        self._held += text
        while self._extract_call(is_last) if self._is_inside else self._emit_text(is_last):
            pass
        given, calls = "".join(self._emitted), self._calls
        self._emitted, self._calls = [], []
        return given, calls

    def _emit_text(self, is_last: bool) -> bool:
        """Emit the text up to the next call, and return whether a call starts. Whitespace around calls is dropped."""
        text, begin, rest = self._held.partition(BEGIN)
        if begin:
            self._emitted.append(text.rstrip())
            self._is_inside = True
        elif is_last:
            self._emitted.append(text.rstrip() if self.count else text)
        else:
            end = len(text) - _count_possible_begin(text)
            self._emitted.append(text[:end])
            rest = text[end:]
        self._held = rest
        return self._is_inside

    def _extract_call(self, is_last: bool) -> bool:
        """Extract the current call, and return whether it was complete."""
        inside, end, rest = (self._held, "", "") if self._is_forced else self._held.partition(END)
        if not end and not is_last:
            return False
        calls = _read_calls(inside)
        if calls:
            self._add_calls(calls)
        else:
            self._emitted.append(inside if self._is_forced else f"{BEGIN}{inside}{end}")
        self._held = rest
        self._is_inside = False
        return True

    def _add_calls(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            if self._is_single and self.count:
                return
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            function = {NAME: name, ARGUMENTS: arguments}
            self._calls.append({"id": call_id, "type": "function", "function": function})
            self.count += 1


def _count_possible_begin(text: str) -> int:
    """Return the number of trailing characters that may start a call, with the whitespace before them."""
    size = next((size for size in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:size])), 0)
    return len(text) - len(text[: len(text) - size].rstrip())


def _read_calls(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of one call or a list of calls; an empty list for any other text."""
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
