"""Long error messages fit into what gRPC carries."""

import pytest

from penstock.core.error_text import shorten


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
