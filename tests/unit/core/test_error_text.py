"""Long error messages fit into what gRPC carries."""

import pytest

from penstock.core.error_text import TAIL_CHARS, shorten, tail


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
    assert tail("a\nb\n\n") == "a\nb"
    long = tail("\n".join(f"line {number} {'x' * 200}" for number in range(1000)))
    assert len(long) == TAIL_CHARS
    assert long.startswith("…")
    assert long.endswith(f"line 999 {'x' * 200}")
