"""HTTP at the level of ASGI: headers that mean something here, bodies read within limits, answers compressed."""

import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from penstock.core.config import Limits
from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.gateway.http.json_size import check_size
from penstock.gateway.large import LARGE_BYTES, LargeMessages

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

COMPRESS_FROM_BYTES = 4096  # smaller answers travel in a few packets anyway
MAX_TIMEOUT_MS = 86_400_000
JSON = b"application/json"
OCTETS = b"application/octet-stream"
MAX_RATIO = 200  # of a body to what it was compressed to
SPARED_BYTES = 4 * 1024 * 1024  # of a body do no harm, whatever they came as
STEP_BYTES = 1024 * 1024
ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
PRINTABLE = re.compile(rb"[\x21-\x7e]{1,256}")


class ClientLeft(Exception):
    """There is nobody to answer."""


async def read_body(headers: Headers, receive: Receive, large: LargeMessages) -> bytes:
    """The whole body, decompressed; raises as soon as it is known to be too large."""
    declared, max_bytes = headers.get(b"content-length", b""), large.limits.max_message_bytes
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large(max_bytes)
    body = await _read(receive, max_bytes)
    encoding = headers.get(b"content-encoding")
    if encoding is None or encoding == b"identity":
        return body
    unpacking = Unpacking(body, encoding.decode("latin-1").strip().lower(), max_bytes)
    del body
    if unpacking.is_short():
        return unpacking.plain()
    return await large.decode(unpacking.max_bytes, unpacking.plain)


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


class Unpacking:
    """A compressed body on its way to what it was: as far as that is not too much, and not too much for its size."""

    def __init__(self, body: bytes, encoding: str, max_bytes: int) -> None:
        if encoding not in ENCODINGS:
            raise InvalidRequest(f"content-encoding '{encoding[:40]}' is not understood; use gzip, deflate or none")
        self._encoding = encoding
        self._limit = max_bytes
        # All that it may become: more than that is a bomb.
        self.max_bytes = min(max_bytes, max(MAX_RATIO * len(body), SPARED_BYTES))
        self._stream = zlib.decompressobj(ZLIB_OR_GZIP)
        self._rest = body
        self._parts: list[bytes] = []
        self._size = 0
        self._is_done = False

    def is_short(self) -> bool:
        """Whether one step was enough."""
        self._step(LARGE_BYTES)
        return self._is_done

    def plain(self) -> bytes:
        while not self._is_done:
            self._step(STEP_BYTES)
        if not self._stream.eof or self._stream.unused_data:
            raise InvalidRequest(f"the body is not valid {self._encoding}: it is cut off, or something follows it")
        return b"".join(self._parts)

    def _step(self, most_bytes: int) -> None:
        try:
            part = self._stream.decompress(self._rest, most_bytes)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not valid {self._encoding}: {error}") from error
        self._parts.append(part)
        self._size += len(part)
        self._rest = self._stream.unconsumed_tail
        self._is_done = self._stream.eof or (not self._rest and len(part) < most_bytes)
        if self._size > self._limit:
            raise too_large(self._limit)
        if self._size > self.max_bytes:
            raise RequestTooLarge(f"the body is over {MAX_RATIO} times as large as it came: send it as it is")


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


async def compress(body: bytes, headers: Headers, large: LargeMessages) -> tuple[bytes, str | None]:
    """The body and its content-encoding, as the client's Accept-Encoding wishes."""
    accepted = headers.get(b"accept-encoding")
    if accepted is None or len(body) < COMPRESS_FROM_BYTES:
        return body, None
    wanted = weights(accepted.decode("latin-1"))
    best = max(("gzip", "deflate"), key=lambda name: wanted.get(name, wanted.get("*", 0.0)))
    if wanted.get(best, wanted.get("*", 0.0)) <= 0.0:
        return body, None
    if len(body) <= LARGE_BYTES:
        return _deflate(body, best), best
    return await large.encode(len(body), _deflate, body, best), best


def _deflate(body: bytes, encoding: str) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, ENCODINGS[encoding])
    return stream.compress(body) + stream.flush()
