"""Shortens and cleans error messages, so that they fit into protocol headers and reveal no files or secrets."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_TEXT_COST = 6000  # bytes of a message when it is percent-encoded for gRPC's metadata
MAX_EDGE_TEXT_COST = (
    7000  # limit with the context that other layers added; gRPC would replace an error of more than 8 KiB
)
MAX_CHAR_COST = 12  # encoded bytes of one character
TAIL_LINES = 24
TAIL_CHARS = 2000
LINE_CHARS = 300
SECRET_WORDS = frozenset(("secret", "key", "password", "token"))
KEY_CHARS = 200
# An absolute path of the server's file system up to its last part, but not one of the server's own URL paths.
FOLDER_PATTERN = re.compile(r"(?<![\w.…/])/(?!v[12]/)(?:[^/\s'\"`,;:()\[\]{}<>|]+/)+")
# Characters that terminals execute, or that reorder or wrap the text after them.
UNPRINTABLE_PATTERN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# Messages by pydantic's type of the error. Other messages of pydantic are plain once their first words are replaced.
PLAIN_PROBLEMS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a mapping, such as {key: value}"),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "must be a list, such as [a, b]"),
    **dict.fromkeys(("string_type", "bytes_type"), "must be text"),
    **dict.fromkeys(("path_type", "path_not_exists"), "must be a path"),
    "finite_number": "must be a finite number",
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "json_invalid": "must be JSON",
    "json_type": "must be JSON",
}
PYDANTIC_PREFIXES = (
    "Input should",
    "String should",
    "List should",
    "Tuple should",
    "Dictionary should",
    "Value should",
)
CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")


def shorten(text: str, max_cost: int = MAX_TEXT_COST) -> str:
    """Cut the middle out of a message whose encoded size exceeds `max_cost` bytes."""
    if MAX_CHAR_COST * len(text) <= max_cost:
        return text
    if len(text) <= max_cost and sum(map(_count_encoded_bytes, text)) <= max_cost:
        return text
    head = _cut_to_encoded_cost(text[:max_cost], max_cost // 4)
    end = _cut_to_encoded_cost(text[-max_cost:][::-1], max_cost - max_cost // 4)[::-1]
    return f"{head} … {end}"


def clean_for_clients(text: str) -> str:
    """Return the first line of a message, without folders and credentials.

    Further lines (tracebacks, source, a process's last output) belong only in the log.
    """
    first = text.lstrip().split("\n", 1)[0].rstrip()
    return CREDENTIALS.sub("…@", FOLDER_PATTERN.sub("", shorten(first, MAX_EDGE_TEXT_COST)))


def escape_control_characters(text: str) -> str:
    """Escape control characters as in Python source."""
    return UNPRINTABLE_PATTERN.sub(lambda found: ascii(found[0])[1:-1], text)


def cut_to_last_lines(text: str) -> str:
    """Return the last lines of a traceback, short enough for an error message."""
    kept = "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
    return kept if len(kept) <= TAIL_CHARS else f"…{kept[1 - TAIL_CHARS :]}"


def get_first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or its class name if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:LINE_CHARS] if lines else type(error).__name__


def explain_cause(error: Exception) -> str:
    """Return in plain words why a file or JSON could not be read; for other errors, the message's first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno} is wrong, or the text ends there"
    return "it is nested too deeply" if isinstance(error, RecursionError) else get_first_line(error)


def describe_first_problem(error: "ValidationError", object_name: str = "") -> str:
    """Return the first invalid key and its problem; `object_name` replaces the key if the whole object is invalid."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:KEY_CHARS] or object_name
    return f"{where}: {describe_problem(first)}" if where else describe_problem(first)


def describe_problem(error: Mapping[str, Any]) -> str:
    """Return the problem that a pydantic error reports in plain words, such as "must be a whole number"."""
    if text := PLAIN_PROBLEMS.get(error["type"]):
        return text
    message = str(error["msg"]).removeprefix("Value error, ")
    for start in PYDANTIC_PREFIXES:
        if message.startswith(start):
            return message.replace(start, "must", 1)
    return message


def describe_given_value(location: Sequence[object], value: object) -> str:
    """Return a setting's value for an error message, or an empty text if it may be or contain a secret."""
    words = str(location[-1]).lower().split("_") if location else ()
    if isinstance(value, dict | list | tuple) or not SECRET_WORDS.isdisjoint(words):
        return ""
    return f"{value!r:.80}"


def _cut_to_encoded_cost(text: str, max_cost: int) -> str:
    costs = accumulate(map(_count_encoded_bytes, text))
    return text[: sum(1 for _ in takewhile(lambda cost: cost <= max_cost, costs))]


def _count_encoded_bytes(char: str) -> int:
    """Return the bytes that a character takes in gRPC's percent-encoding."""
    return 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))


def show_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
