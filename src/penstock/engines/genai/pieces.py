"""From a choice's tokens to the text that may go out: whole characters, and nothing that may begin a stop string."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

UNFINISHED = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come
MAX_BYTES_OF_A_CHARACTER = 4
WINDOW_TOKENS = 64  # decoded at a time: a token's text may depend on those before it
KEPT_TOKENS = 8


class TokenText(Protocol):
    """The text of one sequence as its tokens come."""

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        """What is new of it, in whole characters."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Each token stands for the same bytes everywhere."""

    bytes_of: Mapping[int, bytes]
    errors: str = "ignore"  # what becomes of bytes that are no character: left out, or replaced


class TableText:
    """Where there is a table."""

    def __init__(self, table: TokenTable) -> None:
        self._bytes_of = table.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        return self._decoder.decode(b"".join([self._bytes_of[number] for number in ids]), is_last)


@dataclass(slots=True)
class WindowText:
    """Where a token's text depends on its neighbours: the last tokens are decoded together."""

    decode: Callable[[Sequence[int]], str]
    window: list[int] = field(default_factory=list)
    seen: str = ""  # of the window's text

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        self.window += ids
        text = self.decode(self.window)
        new = text[len(self.seen) :]
        if not is_last and _is_unfinished(new):
            return ""
        self.seen = text
        if len(self.window) > WINDOW_TOKENS:
            self.window = self.window[-KEPT_TOKENS:]
            self.seen = self.decode(self.window)
        return new


@dataclass(slots=True)
class StopText:
    """Ends a text where a stop string begins, and holds back what may be one."""

    stops: tuple[str, ...] = ()
    has_stop: bool = False  # the text ends with the stop string, not before it
    held: str = ""

    def add(self, new: str, is_last: bool) -> tuple[str, bool]:
        """What goes out now, and whether a stop string was found."""
        if not self.stops:
            return new, False
        self.held += new
        found = [(at, stop) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            text = self.held[: at + len(stop) if self.has_stop else at]
            self.held = ""
            return text, True
        end = len(self.held) - (0 if is_last else _begun(self.held, self.stops))
        text, self.held = self.held[:end], self.held[end:]
        return text, False


def make_table(
    vocabulary: Mapping[int, bytes], decode: Callable[[Sequence[Sequence[int]]], list[str]]
) -> TokenTable | None:
    """None: a token's text depends on its neighbours. Those that are no text, such as the end's, have no bytes."""
    texts = dict(zip(vocabulary, decode([[number] for number in vocabulary]), strict=True))
    for errors in ("ignore", "replace"):
        if all(not text or vocabulary[number].decode("utf-8", errors) == text for number, text in texts.items()):
            is_text = {number: vocabulary[number].decode("utf-8", errors) == text for number, text in texts.items()}
            return TokenTable({number: vocabulary[number] if is_text[number] else b"" for number in texts}, errors)
    return None


def _is_unfinished(text: str) -> bool:
    """More of them in a row than a character has bytes are no character's beginning."""
    ends = len(text) - len(text.rstrip(UNFINISHED))
    return 0 < ends < MAX_BYTES_OF_A_CHARACTER


def _begun(text: str, stops: Sequence[str]) -> int:
    """How much of the text's end a stop string begins with."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
