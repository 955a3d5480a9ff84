"""Answers on their way to files and to terminals."""

import io
from collections.abc import AsyncGenerator

from penstock.cli.generation.speaking import Voice, speak
from penstock.client import TextDelta


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_files_get_what_came_and_terminals_see_what_they_would_act_on() -> None:
    for out, shown in ((io.StringIO(), "a\x1b[2Jb\tc\n"), (Screen(), "a\\x1b[2Jb\tc\n")):
        voice = Voice(out)
        voice.say("a\x1b[2Jb\tc")
        voice.end()
        voice.end()  # a line ends once
        assert out.getvalue() == shown


async def test_what_is_said_is_kept_however_it_ends() -> None:
    async def deltas() -> AsyncGenerator[TextDelta, None]:
        yield TextDelta("one")
        yield TextDelta(" two", finish_reason="length")

    out, parts = io.StringIO(), list[str]()
    last = await speak(deltas(), Voice(out), parts)
    assert (last and last.finish_reason, parts, out.getvalue()) == ("length", ["one", " two"], "one two\n")
    nothing: AsyncGenerator[TextDelta, None] = (each async for each in deltas() if not each.text)
    assert await speak(nothing, Voice(out)) is None
