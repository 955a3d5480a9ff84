"""The text that may be sent: whole characters, and nothing that may begin a stop string."""

from collections.abc import Callable, Sequence

import pytest

from penstock.engines.genai.text_pieces import (
    KEPT_TOKENS,
    WINDOW_TOKENS,
    StopText,
    TableText,
    TokenTable,
    TokenText,
    WindowText,
    make_table,
)

TABLE = TokenTable({number: bytes([number]) for number in range(256)})  # a token is a byte


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


MAKERS: list[Callable[[], TokenText]] = [lambda: TableText(TABLE), lambda: WindowText(decode)]


def stream(text: str | bytes, pieces: TokenText, size: int = 1) -> list[str]:
    """Return the text that is sent after every `size` bytes."""
    data = text.encode() if isinstance(text, str) else text
    return [pieces.add(list(data[at : at + size]), at + size >= len(data)) for at in range(0, len(data), size)]


def stop(text: str, stops: StopText, size: int = 1) -> tuple[list[str], bool]:
    out = []
    for at in range(0, len(text), size):
        piece, is_stopped = stops.add(text[at : at + size], at + size >= len(text))
        out.append(piece)
        if is_stopped:
            return out, True
    return out, False


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_are_never_cut(make: Callable[[], TokenText], size: int) -> None:
    text = "naïve – 日本語 🤖👩‍🚀 end"
    out = stream(text, make(), size)
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


def test_bytes_that_never_become_a_character_delay_nothing() -> None:
    assert "".join(stream(b"a\xf0\x9f", TableText(TABLE))) == "a"
    assert "".join(stream(b"\x80" * 20 + b"b", TableText(TABLE))) == "b"
    assert "".join(stream(b"a\xf0\x9f", WindowText(decode))) == "a\ufffd"
    assert "".join(stream(b"\x80" * 20 + b"b", WindowText(decode))) == "\ufffd" * 20 + "b"


def test_a_long_text_is_decoded_in_parts() -> None:
    pieces = WindowText(decode)
    text = "ünïcode " * 50
    assert "".join(stream(text, pieces)) == text
    assert KEPT_TOKENS <= len(pieces.window_ids) <= WINDOW_TOKENS


def test_a_table_exists_if_each_token_has_its_own_text() -> None:
    vocabulary = {0: b"<end>", 1: b"a", 2: b" \xe2\x80", 3: b"\x94b"}
    texts = {0: "", 1: "a", 2: " ", 3: "b"}  # tokens without text or without a whole character have no entry
    table = make_table(vocabulary, lambda sequences: ["".join(texts[number] for number in ids) for ids in sequences])
    assert table == TokenTable({0: b"", 1: b"a", 2: b" \xe2\x80", 3: b"\x94b"}, "ignore")
    assert TableText(table).add([1, 2, 3, 0], True) == "a —b"


def test_invalid_bytes_are_decoded_as_by_the_tokenizer() -> None:
    table = make_table(
        {1: b"a", 2: b"\xe2"}, lambda sequences: [decode(b"a" if ids == [1] else b"\xe2") for ids in sequences]
    )
    assert table is not None
    assert TableText(table).add([2, 1], True) == "\ufffda"


def test_no_table_exists_if_texts_depend_on_neighbouring_tokens() -> None:
    assert make_table({1: "▁a".encode()}, lambda sequences: ["a" for _ in sequences]) is None


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_ends_the_text_before_it(size: int) -> None:
    out, is_stopped = stop("one. ENough, END here", StopText(("END", "never")), size)
    assert ("".join(out), is_stopped) == ("one. ENough, ", True)


def test_no_part_of_a_possible_stop_string_is_sent_early() -> None:
    out, _ = stop("aE b EN EX", StopText(("END",)))
    assert out == ["a", "", "E ", "b", " ", "", "", "EN ", "", "EX"]


def test_text_that_was_held_back_is_sent_at_the_end() -> None:
    assert "".join(stop("the EN", StopText(("END",)))[0]) == "the EN"


def test_the_stop_string_can_be_kept() -> None:
    out, is_stopped = stop("one END two", StopText(("END",), has_stop=True))
    assert ("".join(out), is_stopped) == ("one END", True)


def test_the_earliest_of_several_stop_strings_counts() -> None:
    out, _ = stop("ab\n\ncd", StopText(("cd", "\n\n", "\n")), 6)
    assert "".join(out) == "ab"
