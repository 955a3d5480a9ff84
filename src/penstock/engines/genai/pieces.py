"""From a choice's tokens to the text that may go out: whole characters, and nothing that may begin a stop string."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[Sequence[Sequence[int]]], list[str]]  # of several sequences at once

UNFINISHED = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come
MAX_BYTES_OF_A_CHARACTER = 4
WINDOW_TOKENS = 64  # decoded at a time: a token's text may depend on those before it
KEPT_TOKENS = 8


@dataclass(slots=True)
class ChoiceText:
    stops: tuple[str, ...] = ()
    has_stop: bool = False  # the text ends with the stop string, not before it
    window: list[int] = field(default_factory=list)  # the last tokens
    seen: str = ""  # of the window's text
    held: str = ""  # what has not gone out: it may begin a stop string

    is_whole: bool = True  # the window ends where a character does

    def take(self, text: str, is_last: bool) -> tuple[str, bool]:
        """`text` is the window's. Returns what goes out now, and whether a stop string was found."""
        new = text[len(self.seen) :]
        self.is_whole = is_last or not _is_unfinished(new)
        if not self.is_whole:
            return "", False
        self.seen = text
        self.held += new
        return self._cut(is_last)

    def shorten(self, decode: Decode) -> None:
        """Keeps a long answer from being decoded as a whole with every token."""
        if len(self.window) > WINDOW_TOKENS and self.is_whole:
            self.window = self.window[-KEPT_TOKENS:]
            self.seen = decode([self.window])[0]

    def _cut(self, is_last: bool) -> tuple[str, bool]:
        found = [(at, stop) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            text = self.held[: at + len(stop) if self.has_stop else at]
            self.held = ""
            return text, True
        end = len(self.held) - (0 if is_last else _begun(self.held, self.stops))
        text, self.held = self.held[:end], self.held[end:]
        return text, False


def add_tokens(choices: Sequence[tuple[ChoiceText, Sequence[int], bool]], decode: Decode) -> list[tuple[str, bool]]:
    """Each with its new tokens, and whether they are its last. Decodes all at once."""
    for choice, ids, _ in choices:
        choice.window += ids
    texts = decode([choice.window for choice, *_ in choices]) if choices else []
    found = [choice.take(text, is_last) for (choice, _, is_last), text in zip(choices, texts, strict=True)]
    for choice, *_ in choices:
        choice.shorten(decode)
    return found


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
