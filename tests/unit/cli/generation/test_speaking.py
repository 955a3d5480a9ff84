"""Answers on their way to files and to terminals."""

import io
from collections.abc import Generator

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


def test_what_is_said_is_kept_however_it_ends() -> None:
    def deltas() -> Generator[TextDelta, None, None]:
        yield TextDelta("one")
        yield TextDelta(" two", finish_reason="length")

    out, parts = io.StringIO(), list[str]()
    last = speak(deltas(), Voice(out), parts)
    assert (last and last.finish_reason, parts, out.getvalue()) == ("length", ["one", " two"], "one two\n")
    nothing: Generator[TextDelta, None, None] = (TextDelta(each) for each in "")
    assert speak(nothing, Voice(out)) is None
