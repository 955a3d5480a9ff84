"""The JSON values of the directory: dotted paths, equality as MongoDB defines it, and bounds. Pure: no I/O."""

from collections.abc import Iterator
from typing import Any

from penstock.core.errors import InvalidRequest

Json = Any  # None, bool, int, float, str, list or dict
Document = dict[str, Json]
MISSING: Json = object()  # the value of a path that a document does not have
MAX_PATH = 256  # characters
MAX_DEPTH = 16
MAX_INT = 2**63


def parse_path(text: str) -> tuple[str, ...]:
    """Return the segments of a dotted path, or raise InvalidRequest."""
    parts = tuple(text.split("."))
    if len(text) > MAX_PATH or len(parts) > MAX_DEPTH:
        raise InvalidRequest(
            f"the path '{text[:40]}…' is too long: at most {MAX_PATH} characters and {MAX_DEPTH} segments"
        )
    for segment in parts:
        if not segment or segment.startswith("$") or "\0" in segment:
            raise InvalidRequest(f"'{text[:80]}' is not a path: give names separated by dots, without '$'")
    return parts


def find_values(value: Json, path: tuple[str, ...]) -> Iterator[Json]:
    """Yield the values at a path. A path through a list continues in all elements, or in the element at an index."""
    if not path:
        yield value
    elif isinstance(value, dict):
        if path[0] in value:
            yield from find_values(value[path[0]], path[1:])
        else:
            yield MISSING
    elif isinstance(value, list):
        if (index := parse_index(path[0])) is not None and index < len(value):
            yield from find_values(value[index], path[1:])
        for each in value:
            if isinstance(each, dict):
                yield from find_values(each, path)


def parse_index(segment: str) -> int | None:
    """Return the list index that a segment of a path names, or None if the segment is not an index."""
    return int(segment) if segment.isascii() and segment.isdigit() and len(segment) <= 6 else None


def is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_same(left: Json, right: Json) -> bool:
    """Return whether two values are equal: 1 equals 1.0 but not true. The order of keys does not matter."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_same(value, right[key]) for key, value in left.items())
    return bool(left == right)


def check_bounds(value: Json, max_values: int) -> None:
    """Raise InvalidRequest if a value is nested too deep, has too many values, or has an invalid key or number."""
    left, level, depth = max_values, [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"the document is nested deeper than {MAX_DEPTH} levels")
        left -= len(level)
        if left < 0:
            raise InvalidRequest(f"the document has more than {max_values} values: leave some out")
        level = [child for each in level for child in _list_children(each)]


def _list_children(value: Json) -> list[Json]:
    if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
        raise InvalidRequest(f"{str(value)[:40]} is not a 64-bit number")
    if isinstance(value, float) and value - value != 0:
        raise InvalidRequest(f"the number {value} is not finite: leave it out, or give a finite number")
    if isinstance(value, dict):
        for key in value:
            if "\0" in key or len(key) > MAX_PATH:
                raise InvalidRequest(f"'{key[:40]}' is not a valid key: at most {MAX_PATH} characters, no NUL")
        return list(value.values())
    return value if isinstance(value, list) else []
