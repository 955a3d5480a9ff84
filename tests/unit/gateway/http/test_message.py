"""Compressed bodies: unpacked step by step, as far as that is not too much."""

import gzip
import random
import zlib

import pytest

from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.gateway.http.message import MAX_RATIO, SPARED_BYTES, STEP_BYTES, Unpacking
from penstock.gateway.large import LARGE_BYTES

MAX_BYTES = 64 * 1024 * 1024
NOISE = random.Random(0).randbytes(3_000_000)


def unpacked(body: bytes, encoding: str = "gzip", max_bytes: int = MAX_BYTES) -> bytes:
    unpacking = Unpacking(body, encoding, max_bytes)
    unpacking.is_short()
    return unpacking.plain()


@pytest.mark.parametrize(
    "size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, LARGE_BYTES + STEP_BYTES, 2_500_000]
)
def test_bodies_of_any_size_come_back(size: int) -> None:
    for plain in (NOISE[:size], bytes(size)):
        assert unpacked(gzip.compress(plain)) == plain
        assert unpacked(zlib.compress(plain), "deflate") == plain


def test_a_bomb_is_given_up_early() -> None:
    bomb = gzip.compress(bytes(60_000_000))
    assert len(bomb) * MAX_RATIO < 60_000_000
    unpacking = Unpacking(bomb, "gzip", MAX_BYTES)
    assert not unpacking.is_short()
    assert unpacking.max_bytes == len(bomb) * MAX_RATIO
    with pytest.raises(RequestTooLarge, match=f"{MAX_RATIO} times"):
        unpacking.plain()


def test_a_little_of_nothing_is_no_bomb() -> None:
    assert len(unpacked(gzip.compress(bytes(SPARED_BYTES)))) == SPARED_BYTES


def test_what_is_over_the_limit_is_too_large() -> None:
    with pytest.raises(RequestTooLarge, match="max_message_bytes"):
        unpacked(gzip.compress(NOISE), max_bytes=len(NOISE) - 1)
    assert unpacked(gzip.compress(NOISE), max_bytes=len(NOISE)) == NOISE


@pytest.mark.parametrize(
    "body",
    [b"", b"no", gzip.compress(NOISE)[:-5], gzip.compress(b"{}") * 2],
    ids=["empty", "text", "cut short", "two members"],
)
def test_what_is_not_whole_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpacked(body)
