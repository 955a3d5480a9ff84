"""Converts the tokens of an answer to text: returns whole characters only, and withholds parts of a stop string."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

UNFINISHED = "\ufffd"  # the decoded text of a character whose last bytes have not arrived yet
MAX_BYTES_OF_A_CHARACTER = 4
WINDOW_TOKENS = 64  # decoded together: a token's text may depend on the tokens before it
KEPT_TOKENS = 8


class TokenText(Protocol):
    """Collects the text of one sequence as its tokens arrive."""

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        """Add tokens, and return the text that they complete, in whole characters."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each token, for tokenizers that decode each token independently of its neighbours."""

    bytes_of: Mapping[int, bytes]
    errors: str = "ignore"  # the decoder's mode for invalid bytes: ignore or replace


class TableText:
    """Decodes a sequence of tokens to text with a TokenTable."""

    def __init__(self, table: TokenTable) -> None:
        self._bytes_of = table.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        return self._decoder.decode(b"".join([self._bytes_of[number] for number in ids]), is_last)


@dataclass(slots=True)
class WindowText:
    """Decodes the last few tokens of a sequence together, because a token's text can depend on its neighbours."""

    decode: Callable[[Sequence[int]], str]
    window_ids: list[int] = field(default_factory=list)
    returned: str = ""  # the part of the window's text that was already returned

    def add(self, ids: Sequence[int], is_last: bool) -> str:
        self.window_ids += ids
        text = self.decode(self.window_ids)
        new = text[len(self.returned) :]
        if not is_last and _is_unfinished(new):
            return ""
        self.returned = text
        if len(self.window_ids) > WINDOW_TOKENS:
            self.window_ids = self.window_ids[-KEPT_TOKENS:]
            self.returned = self.decode(self.window_ids)
        return new


@dataclass(slots=True)
class StopText:
    """Ends a text at a stop string, and withholds text that may be the start of a stop string."""

    stops: tuple[str, ...] = ()
    has_stop: bool = False  # whether the text includes the stop string
    withheld: str = ""

    def add(self, new: str, is_last: bool) -> tuple[str, bool]:
        """Return the text that may be sent now, and whether a stop string was found."""
        if not self.stops:
            return new, False
        self.withheld += new
        found = [(at, stop) for stop in self.stops if (at := self.withheld.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            text = self.withheld[: at + len(stop) if self.has_stop else at]
            self.withheld = ""
            return text, True
        end = len(self.withheld) - (0 if is_last else _find_partial_stop(self.withheld, self.stops))
        text, self.withheld = self.withheld[:end], self.withheld[end:]
        return text, False


def make_table(
    vocabulary: Mapping[int, bytes], decode: Callable[[Sequence[Sequence[int]]], list[str]]
) -> TokenTable | None:
    """Return the bytes of all tokens, or None if a token's text depends on its neighbours.

    Tokens without text, such as the end token, have no bytes.
    """
    texts = dict(zip(vocabulary, decode([[number] for number in vocabulary]), strict=True))
    for errors in ("ignore", "replace"):
        if all(not text or vocabulary[number].decode("utf-8", errors) == text for number, text in texts.items()):
            is_text = {number: vocabulary[number].decode("utf-8", errors) == text for number, text in texts.items()}
            return TokenTable({number: vocabulary[number] if is_text[number] else b"" for number in texts}, errors)
    return None


def _is_unfinished(text: str) -> bool:
    """Return whether the text ends with an incomplete character, so that more tokens may complete it."""
    ends = len(text) - len(text.rstrip(UNFINISHED))
    return 0 < ends < MAX_BYTES_OF_A_CHARACTER


def _find_partial_stop(text: str, stops: Sequence[str]) -> int:
    """Return the length of the text's longest suffix that is the start of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
