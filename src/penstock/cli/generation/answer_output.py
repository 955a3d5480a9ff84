"""Print generated text to a terminal or a file as it arrives."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, TextIO

from penstock.core.error_text import escape_control_characters
from penstock.core.errors import DeadlineExceeded
from penstock.terminal.progress import show_steps

if TYPE_CHECKING:
    from penstock.client import TextDelta

BREAKS = "\n\t"


class TextPrinter:
    """Writes text unchanged to files and with escaped control characters to terminals."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._last = ""

    def write(self, text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._is_terminal:
            text = "".join([char if char in BREAKS else escape_control_characters(char) for char in text])
        self._out.write(text)
        self._out.flush()

    def end_line(self) -> None:
        """Write a newline unless the output already ends with one."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
        self._last = "\n"


async def print_deltas(
    deltas: "AsyncGenerator[TextDelta, None]", printer: TextPrinter, parts: list[str] | None = None
) -> "TextDelta | None":
    """Print deltas as they arrive, append their texts to `parts`, and return the last delta.

    The function is asynchronous so that Ctrl-C cancels its task. A KeyboardInterrupt inside gRPC's blocking calls
    could leave a lock held.
    """
    async with aclosing(deltas):
        with show_steps("waiting for the answer"):
            last = await anext(deltas, None)
        try:
            delta = last
            while delta is not None:
                last = delta
                printer.write(last.text)
                if parts is not None:
                    parts.append(last.text)
                delta = await anext(deltas, None)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                "the timeout ended this answer early: give a longer --timeout, or a lower --max-tokens"
            ) from error
        finally:
            printer.end_line()
    return last


def describe_cut(finish_reason: str, tokens: int, max_tokens: int | None) -> str:
    """Explain why an answer with `tokens` tokens is incomplete; empty if the model or a stop text ended it."""
    if finish_reason != "length":
        return ""
    if max_tokens is not None and tokens >= max_tokens:
        return f"the answer was cut off after {max_tokens} tokens: allow more with --max-tokens"
    return f"the answer was cut off after {tokens} tokens: the model's context or settings allow no more"
