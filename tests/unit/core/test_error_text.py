"""Error messages that fit into gRPC's metadata."""

import pytest

from penstock.core.error_text import TAIL_CHARS, clean_for_clients, cut_to_last_lines, explain_cause, shorten


def test_a_file_error_is_explained_without_its_number() -> None:
    assert explain_cause(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"


@pytest.mark.parametrize("char", ["x", "%", "\n", "é", "水", "🌊", "\ud800"])
def test_a_long_text_keeps_its_ends_and_fits_into_grpc_metadata(char: str) -> None:
    assert shorten(f"a{char * 100}z") == f"a{char * 100}z"
    short = shorten(f"the beginning {char * 5_000_000} the end")
    assert short.startswith("the beginning")
    assert short.endswith("the end")
    as_sent = sum(
        1 if " " <= each <= "~" and each != "%" else 3 * len(each.encode("utf-8", "replace")) for each in short
    )
    assert 4000 < as_sent < 6100


def test_the_end_of_a_long_text_is_kept() -> None:
    assert cut_to_last_lines("a\nb\n\n") == "a\nb"
    long = cut_to_last_lines("\n".join(f"line {number} {'x' * 200}" for number in range(1000)))
    assert len(long) == TAIL_CHARS
    assert long.startswith("…")
    assert long.endswith(f"line 999 {'x' * 200}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("the model failed: ValueError: no row\nTraceback (most recent call last):\n  File", None),
        ("the model's process ended while it loaded: exit code 1\nkey=sk-4711", None),
        ("/srv/models/a/model.yaml:3: unknown key 'x'", "model.yaml:3: unknown key 'x'"),
        ("Load model from /home/me/models/a/1/model.onnx failed:no", "Load model from model.onnx failed:no"),
        ("[Errno 2] No such file or directory: '/var/lib/w.bin'", "[Errno 2] No such file or directory: 'w.bin'"),
        ('file=/a/b.txt, (/a/b/c), /a/b/, "/x/y"', 'file=b.txt, (c), , "y"'),
        ("redis://user:secret@cache:6379/0 is away", "redis://…@cache:6379/0 is away"),
        ("see http://localhost:8080/docs/x; /v2/repository/index lists them; '/key'; and/or/not; 1/2/3", ""),
        ("\n  said late\n", "said late"),
        ("", ""),
    ],
)
def test_messages_for_clients_have_no_tracebacks_and_folders(text: str, told: str | None) -> None:
    wanted = text.split("\n")[0] if told is None else told or text
    assert clean_for_clients(text) == wanted


def test_messages_for_clients_are_one_line_of_bounded_length() -> None:
    told = clean_for_clients(f"there is no model '{'n' * 20_000_000}': see /v2/repository/index")
    assert len(told) < 8000
    assert "\n" not in told
    assert told.endswith("see /v2/repository/index")
