"""An answer on its way to a terminal or a file, as it comes."""

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, TextIO

from penstock.cli.terminal.progress import show_steps
from penstock.core.error_text import printable

if TYPE_CHECKING:
    from penstock.client import TextDelta

BREAKS = "\n\t"


class Voice:
    """Writes as it is to files; a terminal would act on control characters, and is shown them."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._last = ""

    def say(self, text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._is_terminal:
            text = "".join([char if char in BREAKS else printable(char) for char in text])
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        """What follows begins on a line of its own."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
        self._last = "\n"


def speak(
    deltas: "Generator[TextDelta, None, None]", voice: Voice, parts: list[str] | None = None
) -> "TextDelta | None":
    """Says what comes, and returns the last of it; `parts` has all that came, whatever ends it."""
    last: TextDelta | None = None
    with closing(deltas):
        with show_steps("waiting for the answer"):
            last = next(deltas, None)
        try:
            while last is not None:
                voice.say(last.text)
                if parts is not None:
                    parts.append(last.text)
                following = next(deltas, None)
                if following is None:
                    break
                last = following
        finally:
            voice.end()
    return last
