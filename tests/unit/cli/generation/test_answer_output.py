"""The output of generated text to files and terminals."""

import io
from collections.abc import AsyncGenerator

from penstock.cli.generation.answer_output import TextPrinter, describe_cut, print_deltas
from penstock.client import TextDelta


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_escaped_on_terminals_only() -> None:
    for out, shown in ((io.StringIO(), "a\x1b[2Jb\tc\n"), (Screen(), "a\\x1b[2Jb\tc\n")):
        printer = TextPrinter(out)
        printer.write("a\x1b[2Jb\tc")
        printer.end_line()
        printer.end_line()  # the second call must not add an empty line
        assert out.getvalue() == shown


async def test_deltas_are_printed_and_collected() -> None:
    async def deltas() -> AsyncGenerator[TextDelta, None]:
        yield TextDelta("one")
        yield TextDelta(" two", finish_reason="length")

    out, parts = io.StringIO(), list[str]()
    last = await print_deltas(deltas(), TextPrinter(out), parts)
    assert (last and last.finish_reason, parts, out.getvalue()) == ("length", ["one", " two"], "one two\n")
    nothing: AsyncGenerator[TextDelta, None] = (each async for each in deltas() if not each.text)
    assert await print_deltas(nothing, TextPrinter(out)) is None


def test_only_a_limit_cuts_an_answer_off() -> None:
    assert describe_cut("stop", 256, 256) == ""
    assert "--max-tokens" in describe_cut("length", 256, 256)
    assert "context" in describe_cut("length", 200, 256)
    assert "context" in describe_cut("length", 200, None)
