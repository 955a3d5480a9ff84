"""HTTP at the level of ASGI: headers that mean something here, bodies read within limits, answers compressed."""

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.gateway.http.json_size import check_size
from penstock.gateway.large import LARGE_BYTES

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

COMPRESS_FROM_BYTES = 4096  # smaller answers travel in a few packets anyway
IN_THREAD_FROM_BYTES = 64 * 1024
MAX_TIMEOUT_MS = 86_400_000
JSON = b"application/json"
OCTETS = b"application/octet-stream"
ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
PRINTABLE = re.compile(rb"[\x21-\x7e]{1,256}")


class ClientLeft(Exception):
    """There is nobody to answer."""


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, decompressed; raises as soon as it is known to be too large."""
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large(max_bytes)
    body = await _read(receive, max_bytes)
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding != b"identity":
        body = await asyncio.to_thread(decompress, body, encoding.decode("latin-1").strip().lower(), max_bytes)
    return body


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()  # the connection ends what stops coming
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join([*chunks, chunk]) if chunks else chunk
        chunks.append(chunk)


def too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is over limits.max_message_bytes ({max_bytes}): send less")


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding not in ENCODINGS:
        raise InvalidRequest(f"content-encoding '{encoding[:40]}' is not understood; use gzip, deflate or none")
    stream = zlib.decompressobj(ZLIB_OR_GZIP)
    try:
        # One byte more than allowed tells a bomb from a body that just fits.
        plain = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {encoding}: {error}") from error
    if len(plain) > max_bytes:
        raise too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest(f"the body is not valid {encoding}: it is cut off, or something follows it")
    return plain


def parse_json(raw: bytes | memoryview, limits: Limits) -> Any:
    """What is large is not parsed on the event loop."""
    if len(raw) > LARGE_BYTES:
        check_size(raw, limits)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def parse_object(raw: bytes | memoryview, limits: Limits) -> dict[str, Any]:
    found = parse_json(raw, limits)
    if type(found) is not dict:
        raise InvalidRequest("the body must be a JSON object")
    return found


def request_id(headers: Headers) -> str:
    found = headers.get(b"x-request-id", b"")
    if found and PRINTABLE.fullmatch(found) is None:
        raise InvalidRequest("x-request-id must be at most 256 printable ASCII characters without blanks")
    return found.decode()


def timeout_s(headers: Headers) -> float | None:
    found = headers.get(b"x-request-timeout-ms")
    if found is None:
        return None
    if not found.isdigit() or len(found) > 8 or not 1 <= int(found) <= MAX_TIMEOUT_MS:
        raise InvalidRequest(f"x-request-timeout-ms must be a whole number from 1 to {MAX_TIMEOUT_MS}")
    return int(found) / 1000


def traceparent(headers: Headers) -> str:
    found = headers.get(b"traceparent", b"")
    return found.decode() if PRINTABLE.fullmatch(found) else ""


def content_type(headers: Headers) -> str:
    """The media type without its parameters, in lower case; empty where the client sent none."""
    return headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower().decode("latin-1")


def prefers_json(accept: str, text: str, other: str = "") -> bool:
    """Whether an Accept header has JSON before a media type of text, and before another type that it must name."""
    wanted = weights(accept)
    rest = wanted.get("*/*", 0.0)
    json = wanted.get("application/json", wanted.get("application/*", rest))
    return json > max(wanted.get(text, wanted.get("text/*", rest)), wanted.get(other, 0.0))


def weights(header: str) -> dict[str, float]:
    """An Accept or Accept-Encoding header as name to weight; what cannot be read weighs nothing."""
    found: dict[str, float] = {}
    for item in header.lower().split(",")[:64]:
        name, *parameters = (part.strip() for part in item.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                number = re.fullmatch(r"[01](\.\d{0,3})?", parameter[2:])
                weight = min(1.0, float(number[0])) if number else 0.0
        if name:
            found[name] = weight
    return found


async def compress(body: bytes, headers: Headers) -> tuple[bytes, str | None]:
    """The body and its content-encoding, as the client's Accept-Encoding wishes."""
    accepted = headers.get(b"accept-encoding")
    if accepted is None or len(body) < COMPRESS_FROM_BYTES:
        return body, None
    wanted = weights(accepted.decode("latin-1"))
    best = max(("gzip", "deflate"), key=lambda name: wanted.get(name, wanted.get("*", 0.0)))
    if wanted.get(best, wanted.get("*", 0.0)) <= 0.0:
        return body, None
    if len(body) < IN_THREAD_FROM_BYTES:
        return _deflate(body, best), best
    return await asyncio.to_thread(_deflate, body, best), best


def _deflate(body: bytes, encoding: str) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, ENCODINGS[encoding])
    return stream.compress(body) + stream.flush()
