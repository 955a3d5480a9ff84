"""Error messages within what protocols carry."""

from itertools import accumulate, takewhile

TEXT_COST = 6000  # as gRPC's metadata carries it
EDGE_COST = 7000  # of what parts have made of it; beyond 8 KiB the caller would get another error
MOST_COST = 12  # of one character
TAIL_LINES = 24
TAIL_CHARS = 2000
LINE_CHARS = 300


def shorten(text: str, most: int = TEXT_COST) -> str:
    """The beginning and the end, within what an error message may cost on its way."""
    if MOST_COST * len(text) <= most:
        return text
    if len(text) <= most and sum(map(_cost, text)) <= most:
        return text
    head = _within(text[:most], most // 4)
    end = _within(text[-most:][::-1], most - most // 4)[::-1]
    return f"{head}\n…\n{end}"


def tail(text: str) -> str:
    """The last lines, which say most of a traceback, within what an error message may hold."""
    kept = "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
    return kept if len(kept) <= TAIL_CHARS else f"…{kept[1 - TAIL_CHARS :]}"


def first_line(error: Exception) -> str:
    """What an exception says first; its name where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:LINE_CHARS] if lines else type(error).__name__


def _within(text: str, budget: int) -> str:
    costs = accumulate(map(_cost, text))
    return text[: sum(1 for _ in takewhile(lambda cost: cost <= budget, costs))]


def _cost(char: str) -> int:
    """gRPC writes a byte as itself or as %XX."""
    return 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))
