"""HTTP messages at the level of ASGI: parsing headers, reading bodies within limits, compressing answers."""

import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.endpoints.json_size import check_json_nesting, check_json_size
from penstock.endpoints.large_messages import LARGE_BYTES, LargeMessagePool

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

COMPRESS_FROM_BYTES = 4096  # smaller answers fit into a few packets anyway
MAX_TIMEOUT_MS = 86_400_000
JSON = b"application/json"
OCTET_STREAM = b"application/octet-stream"
MAX_COMPRESSION_RATIO = 200  # highest ratio of a body's size to its compressed size
UNCHECKED_BYTES = 4 * 1024 * 1024  # a body up to this size may have any ratio
STEP_BYTES = 1024 * 1024
ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
PRINTABLE = re.compile(rb"[\x21-\x7e]{1,256}")


class ClientLeft(Exception):
    """The client disconnected before its answer."""


async def read_body(headers: Headers, receive: Receive, large: LargeMessagePool) -> bytes:
    """Return the whole body, decompressed. Raise RequestTooLarge as soon as it is known to be too large."""
    declared, max_bytes = headers.get(b"content-length", b""), large.limits.max_message_bytes
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise create_too_large_error(max_bytes)
    body = await read_chunks(receive, max_bytes)
    encoding = headers.get(b"content-encoding")
    if encoding is None or encoding == b"identity":
        return body
    decompression = Decompression(body, encoding.decode("latin-1").strip().lower(), max_bytes)
    del body
    if decompression.decompress_first():
        return decompression.decompress()
    return await large.decode(decompression.max_bytes, decompression.decompress)


async def read_chunks(receive: Receive, max_bytes: int) -> bytes:
    """Return the body as it was sent; raise RequestTooLarge above `max_bytes`."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()  # the connection's own timeouts end a body that stops arriving
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise create_too_large_error(max_bytes)
        if not message.get("more_body", False):
            return b"".join([*chunks, chunk]) if chunks else chunk
        chunks.append(chunk)


def create_too_large_error(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is over limits.max_message_bytes ({max_bytes}): send less")


class Decompression:
    """A compressed body being decompressed, with limits on its size and on its compression ratio."""

    def __init__(self, body: bytes, encoding: str, max_bytes: int) -> None:
        if encoding not in ENCODINGS:
            raise InvalidRequest(f"content-encoding '{encoding[:40]}' is not supported: use gzip, deflate or none")
        self._encoding = encoding
        self._limit = max_bytes
        # A larger result is taken for a decompression bomb.
        self.max_bytes = min(max_bytes, max(MAX_COMPRESSION_RATIO * len(body), UNCHECKED_BYTES))
        self._stream = zlib.decompressobj(ZLIB_OR_GZIP)
        self._rest = body
        self._parts: list[bytes] = []
        self._size = 0
        self._is_done = False

    def decompress_first(self) -> bool:
        """Decompress the first LARGE_BYTES; return whether the body is complete."""
        self._decompress_step(LARGE_BYTES)
        return self._is_done

    def decompress(self) -> bytes:
        while not self._is_done:
            self._decompress_step(STEP_BYTES)
        if not self._stream.eof or self._stream.unused_data:
            raise InvalidRequest(f"the body is not valid {self._encoding}: it is truncated, or other data follows it")
        return b"".join(self._parts)

    def _decompress_step(self, most_bytes: int) -> None:
        try:
            part = self._stream.decompress(self._rest, most_bytes)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not valid {self._encoding}: {error}") from error
        self._parts.append(part)
        self._size += len(part)
        self._rest = self._stream.unconsumed_tail
        self._is_done = self._stream.eof or (not self._rest and len(part) < most_bytes)
        if self._size > self._limit:
            raise create_too_large_error(self._limit)
        if self._size > self.max_bytes:
            raise RequestTooLarge(
                f"the body is more than {MAX_COMPRESSION_RATIO} times its compressed size: send it uncompressed"
            )


def parse_json(raw: bytes | memoryview, limits: Limits) -> Any:
    """Return the parsed JSON. Call this in a thread if `raw` is large."""
    if len(raw) > LARGE_BYTES:
        check_json_size(raw, limits)
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    check_json_nesting(raw, found)
    return found


def parse_object(raw: bytes | memoryview, limits: Limits) -> dict[str, Any]:
    found = parse_json(raw, limits)
    if type(found) is not dict:
        raise InvalidRequest("the body must be a JSON object")
    return found


def read_request_id(headers: Headers) -> str:
    return parse_request_id(headers.get(b"x-request-id", b""))


def parse_request_id(value: bytes) -> str:
    if value and PRINTABLE.fullmatch(value) is None:
        raise InvalidRequest("x-request-id must be at most 256 printable ASCII characters without spaces")
    return value.decode()


def read_timeout_s(headers: Headers) -> float | None:
    found = headers.get(b"x-request-timeout-ms")
    if found is None:
        return None
    if not found.isdigit() or len(found) > 8 or not 1 <= int(found) <= MAX_TIMEOUT_MS:
        raise InvalidRequest(f"x-request-timeout-ms must be a whole number from 1 to {MAX_TIMEOUT_MS}")
    return int(found) / 1000


def read_traceparent(headers: Headers) -> str:
    found = headers.get(b"traceparent", b"")
    return found.decode() if PRINTABLE.fullmatch(found) else ""


def read_content_type(headers: Headers) -> str:
    """Return the media type in lower case, without parameters; an empty string if the client sent none."""
    return headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower().decode("latin-1")


def prefers_json(accept: str, media_type: str, other_type: str = "") -> bool:
    """Return whether an Accept header prefers JSON to the media type `media_type` and to `other_type`.

    `other_type` counts only if the header names it.
    """
    wanted = parse_weights(accept)
    rest = wanted.get("*/*", 0.0)
    json = wanted.get("application/json", wanted.get("application/*", rest))
    return json > max(wanted.get(media_type, wanted.get("text/*", rest)), wanted.get(other_type, 0.0))


def parse_weights(header: str) -> dict[str, float]:
    """Parse an Accept or Accept-Encoding header into weights by name; an invalid weight is 0."""
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


async def compress(body: bytes, headers: Headers, large: LargeMessagePool) -> tuple[bytes, str | None]:
    """Compress the body if the client's Accept-Encoding allows it, and return it with its content-encoding or None."""
    accepted = headers.get(b"accept-encoding")
    if accepted is None or len(body) < COMPRESS_FROM_BYTES:
        return body, None
    wanted = parse_weights(accepted.decode("latin-1"))
    best = max(("gzip", "deflate"), key=lambda name: wanted.get(name, wanted.get("*", 0.0)))
    if wanted.get(best, wanted.get("*", 0.0)) <= 0.0:
        return body, None
    if len(body) <= LARGE_BYTES:
        return _deflate(body, best), best
    return await large.encode(len(body), _deflate, body, best), best


def _deflate(body: bytes, encoding: str) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, ENCODINGS[encoding])
    return stream.compress(body) + stream.flush()
