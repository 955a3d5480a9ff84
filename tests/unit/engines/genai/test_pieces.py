"""What of a text may go out: whole characters, and nothing that may begin a stop string."""

from collections.abc import Sequence

import pytest

from penstock.engines.genai.pieces import KEPT_TOKENS, WINDOW_TOKENS, ChoiceText, add_tokens


def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
    """A token is a byte."""
    return [bytes(ids).decode("utf-8", "replace") for ids in sequences]


def stream(text: str | bytes, choice: ChoiceText, size: int = 1) -> tuple[list[str], bool]:
    """What goes out with each `size` bytes, as far as the stop string, and whether there was one."""
    data = text.encode() if isinstance(text, str) else text
    out = []
    for at in range(0, len(data), size):
        ((piece, is_stopped),) = add_tokens([(choice, list(data[at : at + size]), at + size >= len(data))], decode)
        out.append(piece)
        if is_stopped:
            return out, True
    return out, False


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_character_is_never_cut(size: int) -> None:
    text = "naïve – 日本語 🤖👩‍🚀 end"
    out, _ = stream(text, ChoiceText(), size)
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


def test_what_never_becomes_a_character_goes_out_as_such() -> None:
    out, _ = stream(b"a\xf0\x9f", ChoiceText())
    assert "".join(out) == "a\ufffd"
    out, _ = stream(b"\x80" * 20 + b"b", ChoiceText())
    assert "".join(out) == "\ufffd" * 20 + "b"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_ends_the_text_before_it(size: int) -> None:
    out, is_stopped = stream("one. ENough, END here", ChoiceText(("END", "never")), size)
    assert ("".join(out), is_stopped) == ("one. ENough, ", True)


def test_no_part_of_a_stop_string_goes_out_before_it_is_known_to_be_none() -> None:
    out, _ = stream("aE b EN EX", ChoiceText(("END",)))
    assert out == ["a", "", "E ", "b", " ", "", "", "EN ", "", "EX"]


def test_what_was_held_goes_out_at_the_end() -> None:
    assert "".join(stream("the EN", ChoiceText(("END",)))[0]) == "the EN"


def test_the_stop_string_may_be_kept() -> None:
    out, is_stopped = stream("one END two", ChoiceText(("END",), has_stop=True))
    assert ("".join(out), is_stopped) == ("one END", True)


def test_the_earliest_of_several_stop_strings_counts() -> None:
    out, _ = stream("ab\n\ncd", ChoiceText(("cd", "\n\n", "\n")), 6)
    assert "".join(out) == "ab"


def test_a_long_text_is_decoded_in_parts() -> None:
    choice = ChoiceText()
    text = "ünïcode " * 50
    assert "".join(stream(text, choice)[0]) == text
    assert KEPT_TOKENS <= len(choice.window) <= WINDOW_TOKENS + 4
