"""Error messages within what protocols carry, and without what is the server's own."""

import re
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

TEXT_COST = 6000  # as gRPC's metadata carries it
EDGE_COST = 7000  # of what parts have made of it; beyond 8 KiB the caller would get another error
MOST_COST = 12  # of one character
TAIL_LINES = 24
TAIL_CHARS = 2000
LINE_CHARS = 300
SECRET_WORDS = frozenset(("secret", "key", "password", "token"))
KEY_CHARS = 200
# A folder of the server's, down to the last part; the server's own routes are none.
FOLDER = re.compile(r"(?<![\w.…/])/(?!v[12]/)(?:[^/\s'\"`,;:()\[\]{}<>|]+/)+")
# Terminals act on these, or show what follows in another order or on another line.
UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")


def shorten(text: str, most: int = TEXT_COST) -> str:
    """The beginning and the end, within what an error message may cost on its way."""
    if MOST_COST * len(text) <= most:
        return text
    if len(text) <= most and sum(map(_cost, text)) <= most:
        return text
    head = _within(text[:most], most // 4)
    end = _within(text[-most:][::-1], most - most // 4)[::-1]
    return f"{head} … {end}"


def for_clients(text: str) -> str:
    """What is behind the first line (a traceback, source, a process's last words) is for the log, and so is where the
    server has its files."""
    first = text.lstrip().split("\n", 1)[0].rstrip()
    return CREDENTIALS.sub("…@", FOLDER.sub("", shorten(first, EDGE_COST)))


def printable(text: str) -> str:
    """Control characters as they are written in source."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def tail(text: str) -> str:
    """The last lines, which say most of a traceback, within what an error message may hold."""
    kept = "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
    return kept if len(kept) <= TAIL_CHARS else f"…{kept[1 - TAIL_CHARS :]}"


def first_line(error: Exception) -> str:
    """What an exception says first; its name where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:LINE_CHARS] if lines else type(error).__name__


def first_problem(error: "ValidationError", whole: str = "") -> str:
    """The key and what is wrong with it, in one sentence; `whole` is said where it is no single key's."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:KEY_CHARS] or whole
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def given_value(location: Sequence[object], value: object) -> str:
    """What a setting was given, for whoever gave it; empty where it may be a secret, or hold one."""
    words = str(location[-1]).lower().split("_") if location else ()
    if isinstance(value, dict | list | tuple) or not SECRET_WORDS.isdisjoint(words):
        return ""
    return f"{value!r:.80}"


def _within(text: str, budget: int) -> str:
    costs = accumulate(map(_cost, text))
    return text[: sum(1 for _ in takewhile(lambda cost: cost <= budget, costs))]


def _cost(char: str) -> int:
    """gRPC writes a byte as itself or as %XX."""
    return 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))


def show_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
