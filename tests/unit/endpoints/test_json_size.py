"""JSON texts that would take too much memory when parsed: values and keys are counted, and texts measured."""

import json
from typing import Any, ClassVar

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.endpoints.json_size import MAX_NESTING, check_json_nesting, check_json_size


class FewLimits(Limits):
    max_values: ClassVar[int] = 1024
    max_keys: ClassVar[int] = 1024


class FewKeys(Limits):
    max_keys: ClassVar[int] = 1024


LIMITS = FewLimits()
TEXTS = st.text(st.sampled_from('\\",:[]{}a\N{GRINNING FACE}'), max_size=8)


@pytest.mark.parametrize(
    "made", [lambda n: [0] * n, lambda n: [""] * n, lambda n: [[]] * (n // 2), lambda n: [{}] * (n // 2)]
)
def test_values_are_counted(made: Any) -> None:
    check_json_size(json.dumps(made(1024)).encode(), LIMITS)
    with pytest.raises(RequestTooLarge, match=r"1024 values: .*binary"):
        check_json_size(json.dumps(made(1100)).encode(), LIMITS)


def test_keys_are_counted() -> None:
    few = FewKeys()
    check_json_size(json.dumps({str(n): 1 for n in range(1024)}).encode(), few)
    with pytest.raises(RequestTooLarge, match="1024 keys"):
        check_json_size(json.dumps({str(n): 1 for n in range(1025)}).encode(), few)


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=32), st.integers(1, 64), st.booleans())
def test_punctuation_in_strings_is_not_counted_at_any_piece_size(
    texts: list[str], piece_bytes: int, is_ascii: bool
) -> None:
    raw = json.dumps(texts + [0] * (1024 - len(texts)), ensure_ascii=is_ascii).encode()
    check_json_size(raw, LIMITS, piece_bytes)
    with pytest.raises(RequestTooLarge):
        check_json_size(memoryview(raw[:-1] + b',""]'), LIMITS, piece_bytes)


WIDE = st.text(
    st.sampled_from('a\\"\n\N{LATIN SMALL LETTER E WITH ACUTE}\u4e2d\N{GRINNING FACE}'), min_size=1, max_size=8
)


def memory_of(text: str) -> int:
    """Return the memory that Python needs for the characters of a text."""
    widest = max(map(ord, text), default=0)
    return len(text) * (1 if widest < 256 else 2 if widest < 65_536 else 4)


@settings(deadline=None)
@given(st.lists(st.tuples(WIDE, st.integers(1, 40)), max_size=16), st.integers(1, 64), st.booleans())
def test_texts_are_never_taken_for_smaller_than_they_are(
    texts: list[tuple[str, int]], piece_bytes: int, is_ascii: bool
) -> None:
    raw = json.dumps([text * times for text, times in texts], ensure_ascii=is_ascii).encode()
    memory = sum(memory_of(text * times) for text, times in texts)
    tight = Limits.model_construct(max_message_bytes=(memory - 1) * 2 // 3)
    if memory:
        with pytest.raises(RequestTooLarge, match="max_message_bytes"):
            check_json_size(raw, tight, piece_bytes)


@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_wide_character_makes_a_long_text_too_large(is_ascii: bool) -> None:
    def check(text: str) -> None:
        check_json_size(
            json.dumps(["b", text], ensure_ascii=is_ascii).encode(), Limits(max_message_bytes=100_000), 4096
        )

    check("a" * 90_000)
    check("a" * 49_000 + "\u4e2d")
    check("\u4e2d" * 49_000)
    check("\N{GRINNING FACE}" * 18_000)
    for wide in ("\u4e2d", "\N{GRINNING FACE}"):
        with pytest.raises(RequestTooLarge, match="memory"):
            check("a" * 90_000 + wide)
        with pytest.raises(RequestTooLarge, match="memory"):
            check(wide + "a" * 90_000)


@pytest.mark.parametrize("make", [lambda inner: [1, inner], lambda inner: {"a": 1, "b": inner}])
def test_deep_nesting_is_refused_and_wide_nesting_is_not(make: Any) -> None:
    found: Any = [[{}] * 1000]
    for _ in range(MAX_NESTING - 3):
        found = make(found)
    check_json_nesting(orjson.dumps(found), found)
    with pytest.raises(InvalidRequest, match="deeper than 200 levels"):
        check_json_nesting(json.dumps([found]).encode(), [found])
