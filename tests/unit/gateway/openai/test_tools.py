"""Tools: the choice of tools, and tool calls in generated text of any pieces."""

import json
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.gateway.openai.chat_requests import read_chat
from penstock.gateway.openai.tools import CallReader, ToolUse

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
TWO = '<tool_call>[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"city": "Rome"}}]</tool_call>'


def read(text: str, use: ToolUse, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """Read the text in pieces of this size, and return the text and the calls."""
    reader = CallReader(use)
    given, calls = "", []
    pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
    for number, piece in enumerate(pieces):
        more, found = reader.read(piece, number == len(pieces) - 1)
        given += more
        calls += [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]
    assert reader.count == len(calls)
    return given, calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "given", "calls"),
    [
        ("plain text < with <tool> in it\n", "plain text < with <tool> in it\n", []),
        (ONE, "", [("weather", {"city": "Łódź"})]),
        (f"Let me look.\n{ONE}\n", "Let me look.", [("weather", {"city": "Łódź"})]),
        (f"{ONE}\n{ONE}", "", [("weather", {"city": "Łódź"})] * 2),
        (TWO, "", [("clock", {}), ("weather", {"city": "Rome"})]),
        ('<tool_call>{"name": "clock"}', "", [("clock", {})]),  # cut off by the end, but complete
        ("<tool_call>no JSON</tool_call> so", "<tool_call>no JSON</tool_call> so", []),
        ('<tool_call>{"name": "weath', '<tool_call>{"name": "weath', []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("ends with <tool_", "ends with <tool_", []),
    ],
)
def test_calls_are_found_in_text_of_any_pieces(text, given, calls, size):
    assert read(text, ToolUse(()), size) == (given, calls)


def test_only_one_call_is_returned_without_parallel_calls():
    assert read(TWO, ToolUse((), is_single=True), 5)[1] == [("clock", {})]
    assert read(ONE + ONE, ToolUse((), is_single=True), 5)[1] == [("weather", {"city": "Łódź"})]


def test_a_forced_answer_is_one_call():
    forced = ToolUse((), is_forced=True)
    assert read('{"name": "clock", "arguments": {}}', forced, 4) == ("", [("clock", {})])
    assert read('{"name": "clo', forced, 4) == ('{"name": "clo', [])  # cut off by its length


def asked(**body: Any) -> Any:
    return read_chat({"model": "m", "messages": [{"role": "user", "content": "a"}], **body})


def test_tools_are_passed_to_the_template():
    found = asked(tools=[WEATHER, CLOCK])
    assert json.loads(found.request.parameters["tools"]) == [WEATHER, CLOCK]
    assert "response_format" not in found.request.parameters
    assert "tools" not in asked(tools=[WEATHER], tool_choice="none").request.parameters
    assert asked(tools=[WEATHER], parallel_tool_calls=False).tool_use.is_single


def test_a_forced_call_sets_a_response_format():
    named = asked(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "weather"}})
    wanted = json.loads(named.request.parameters["response_format"])["json_schema"]["schema"]
    assert wanted["properties"]["name"] == {"const": "weather"}
    assert wanted["properties"]["arguments"] == WEATHER["function"]["parameters"]
    assert json.loads(named.request.parameters["tools"]) == [WEATHER]
    required = asked(tools=[WEATHER, CLOCK], tool_choice="required")
    wanted = json.loads(required.request.parameters["response_format"])["json_schema"]["schema"]
    assert [each["properties"]["name"]["const"] for each in wanted["anyOf"]] == ["weather", "clock"]


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": "always"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"tools": [WEATHER], "tool_choice": {"type": "function"}},
    ],
)
def test_an_invalid_tool_choice_is_refused(body):
    with pytest.raises(InvalidRequest) as refused:
        asked(**body)
    assert refused.value.fields["parameter"] == "tool_choice"
