"""An answer on its way to a terminal or a file, as it comes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
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


async def speak(
    deltas: "AsyncGenerator[TextDelta, None]", voice: Voice, parts: list[str] | None = None
) -> "TextDelta | None":
    """Says what comes, and returns the last of it; `parts` has all that came, whatever ends it.

    On an event loop, where Ctrl-C cancels a task: raised inside gRPC's blocking calls, it may leave a lock held.
    """
    async with aclosing(deltas):
        with show_steps("waiting for the answer"):
            last = await anext(deltas, None)
        try:
            following = last
            while following is not None:
                last = following
                voice.say(last.text)
                if parts is not None:
                    parts.append(last.text)
                following = await anext(deltas, None)
        finally:
            voice.end()
    return last
