"""JSON is counted before it is parsed: values and keys outside strings, whatever is inside them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.config import Limits
from penstock.core.errors import RequestTooLarge
from penstock.gateway.http.json_size import check_size

LIMITS = Limits(max_values=1024, max_keys=1024)
TEXTS = st.text(st.sampled_from('\\",:[]{}a\N{GRINNING FACE}'), max_size=8)


@pytest.mark.parametrize(
    "made", [lambda n: [0] * n, lambda n: [""] * n, lambda n: [[]] * (n // 2), lambda n: [{}] * (n // 2)]
)
def test_values(made: Any) -> None:
    check_size(json.dumps(made(1024)).encode(), LIMITS)
    with pytest.raises(RequestTooLarge, match=r"limits.max_values.*binary"):
        check_size(json.dumps(made(1100)).encode(), LIMITS)


def test_keys() -> None:
    few = Limits(max_keys=1024)
    check_size(json.dumps({str(n): 1 for n in range(1024)}).encode(), few)
    with pytest.raises(RequestTooLarge, match=r"limits.max_keys"):
        check_size(json.dumps({str(n): 1 for n in range(1025)}).encode(), few)


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=32), st.integers(1, 64), st.booleans())
def test_punctuation_in_strings_counts_as_nothing_wherever_it_is_cut(
    texts: list[str], piece_bytes: int, is_ascii: bool
) -> None:
    raw = json.dumps(texts + [0] * (1024 - len(texts)), ensure_ascii=is_ascii).encode()
    check_size(raw, LIMITS, piece_bytes)
    with pytest.raises(RequestTooLarge):
        check_size(memoryview(raw[:-1] + b',""]'), LIMITS, piece_bytes)
