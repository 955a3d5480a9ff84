"""Bodies within limits: compressed ones are decompressed in steps."""

import gzip
import random
import zlib

import pytest

from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.endpoints.http.http_message import MAX_COMPRESSION_RATIO, STEP_BYTES, UNCHECKED_BYTES, Decompression
from penstock.endpoints.large_messages import LARGE_BYTES

MAX_BYTES = 64 * 1024 * 1024
NOISE = random.Random(0).randbytes(3_000_000)


def unpacked(body: bytes, encoding: str = "gzip", max_bytes: int = MAX_BYTES) -> bytes:
    unpacking = Decompression(body, encoding, max_bytes)
    unpacking.decompress_first()
    return unpacking.decompress()


@pytest.mark.parametrize(
    "size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, LARGE_BYTES + STEP_BYTES, 2_500_000]
)
def test_compressed_bodies_of_any_size_are_decompressed(size: int) -> None:
    for plain in (NOISE[:size], bytes(size)):
        assert unpacked(gzip.compress(plain)) == plain
        assert unpacked(zlib.compress(plain), "deflate") == plain


def test_decompression_of_a_bomb_stops_early() -> None:
    bomb = gzip.compress(bytes(60_000_000))
    assert len(bomb) * MAX_COMPRESSION_RATIO < 60_000_000
    unpacking = Decompression(bomb, "gzip", MAX_BYTES)
    assert not unpacking.decompress_first()
    assert unpacking.max_bytes == len(bomb) * MAX_COMPRESSION_RATIO
    with pytest.raises(RequestTooLarge, match=f"{MAX_COMPRESSION_RATIO} times"):
        unpacking.decompress()


def test_a_small_body_may_have_any_compression_ratio() -> None:
    assert len(unpacked(gzip.compress(bytes(UNCHECKED_BYTES)))) == UNCHECKED_BYTES


def test_a_body_over_the_limit_is_refused() -> None:
    with pytest.raises(RequestTooLarge, match="max_message_bytes"):
        unpacked(gzip.compress(NOISE), max_bytes=len(NOISE) - 1)
    assert unpacked(gzip.compress(NOISE), max_bytes=len(NOISE)) == NOISE


@pytest.mark.parametrize(
    "body",
    [b"", b"no", gzip.compress(NOISE)[:-5], gzip.compress(b"{}") * 2],
    ids=["empty", "text", "cut short", "two members"],
)
def test_an_incomplete_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpacked(body)
