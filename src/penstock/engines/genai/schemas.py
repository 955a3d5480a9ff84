"""Which JSON schemas are looked at any further: one request's must not hold up all others, or end their process."""

import json
import re
from typing import Any

from penstock.core.errors import InvalidRequest

MAX_BYTES = 64 * 1024
MAX_DEPTH = 64
MAX_NODES = 5_000
MAX_REPEATS = 1_024  # of an item, or of a part of a pattern
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REPEATS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def check_schema(text: str) -> None:
    """Raises InvalidRequest. Whether what it lets pass makes sense is the engine's to say."""
    if len(text) > MAX_BYTES:
        raise _wrong(f"it has {len(text)} characters, and may have {MAX_BYTES}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise _wrong("it is no object")
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    for nodes in range(MAX_NODES + 1):
        if not waiting:
            return
        node, depth = waiting.pop()
        if depth > MAX_DEPTH or nodes == MAX_NODES:
            raise _wrong(f"it is nested deeper than {MAX_DEPTH}, or has more than {MAX_NODES} parts")
        if isinstance(node, dict):
            _check_repeats(node)
            waiting += [(each, depth + 1) for each in node.values()]
        elif isinstance(node, list):
            waiting += [(each, depth + 1) for each in node]


def _check_repeats(node: dict[str, Any]) -> None:
    for key in _COUNTS:
        value = node.get(key)
        if isinstance(value, int | float) and value > MAX_REPEATS:
            raise _wrong(f"{key} is {value}, and may be {MAX_REPEATS}")
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        repeats = 1
        for found in _REPEATS.finditer(pattern):
            repeats *= max(1, *(int(number[:9]) for number in found.groups() if number))
        if repeats > MAX_REPEATS:
            raise _wrong(f"a pattern repeats its parts {repeats} times, and may do so {MAX_REPEATS} times")


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: the JSON schema cannot be used: {what}", parameter="response_format")
