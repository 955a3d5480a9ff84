"""Messages between two processes of one machine: a JSON header, then the tensors' bytes unless an arena has them."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson

from penstock.core.errors import WireError
from penstock.core.tensors import Buffer, Tensor
from penstock.wire.ipc.arena import Arena

MAX_INLINE_BYTES = 64 * 1024  # larger messages are faster through shared memory
MAX_HEADER_BYTES = 16 * 1024 * 1024
_PREFIX = struct.Struct("<II")  # bytes of the header, bytes of tensors that follow it


@dataclass(slots=True)
class Message:
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    slot: int = 0  # the slot whose arena is used for large tensors

    @property
    def size_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors)

    def pack(self, outgoing: Arena | None = None) -> bytes:
        """Return the message's bytes for the socket; write large tensors to the arena. Small messages need no arena."""
        data = [tensor.data for tensor in self.tensors]
        described = [(tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in self.tensors]
        size = sum(len(part) for part in data)
        if size > MAX_INLINE_BYTES:
            assert outgoing is not None
            outgoing.write(data)
            data, size = [], 0
        header = _dump_header((self.kind, self.fields, self.slot, described))
        return b"".join((_PREFIX.pack(len(header), size), header, *data))


@dataclass(slots=True)
class Envelope:
    """A received message whose tensors may still be in an arena."""

    kind: str
    fields: dict[str, Any]
    slot: int
    descriptors: list[tuple[str, str, list[int], int]]
    body: bytearray

    @property
    def size_bytes(self) -> int:
        return sum(size for *_, size in self.descriptors)

    def open(self, incoming: Arena) -> Message:
        """Return the message with copies of its tensors, because the writer reuses the arena for the next message."""
        try:
            sizes = [size for _, _, _, size in self.descriptors]
            data: Sequence[Buffer] = (
                incoming.read(sizes) if sum(sizes) > MAX_INLINE_BYTES else _split_body(self.body, sizes)
            )
            tensors = [
                Tensor(name, datatype, tuple(shape), part)
                for (name, datatype, shape, _), part in zip(self.descriptors, data, strict=True)
            ]
        except (ValueError, TypeError) as error:
            raise WireError("invalid message: its tensors do not match its header") from error
        return Message(self.kind, self.fields, tensors, self.slot)


class Inbox:
    """Splits a stream of bytes into envelopes."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Envelope]:
        received = self._received
        received += data
        found: list[Envelope] = []
        start = 0
        while len(received) - start >= _PREFIX.size:
            header_size, body_size = _PREFIX.unpack_from(received, start)
            if header_size > MAX_HEADER_BYTES or body_size > MAX_INLINE_BYTES:
                raise WireError("invalid message: its announced size is too large")
            body_at = start + _PREFIX.size + header_size
            end = body_at + body_size
            if end > len(received):
                break
            found.append(_parse_envelope(received[start + _PREFIX.size : body_at], received[body_at:end]))
            start = end
        del received[:start]
        return found


def _parse_envelope(header: bytearray, body: bytearray) -> Envelope:
    try:
        kind, fields, slot, described = _load_header(header)
        return Envelope(kind, dict(fields), slot, described, body)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError("invalid message: its header cannot be parsed") from error


def _dump_header(header: object) -> bytes:
    """Return a header as JSON. Use orjson, which is faster than json, except for NaN and surrogate characters."""
    try:
        dumped = orjson.dumps(header)
    except TypeError:
        dumped = b"null"
    return json.dumps(header).encode() if b"null" in dumped else dumped


def _load_header(header: bytearray) -> Any:
    try:
        return orjson.loads(header)
    except orjson.JSONDecodeError:
        return json.loads(header)


def _split_body(body: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Copy each tensor's bytes to separate memory, which is aligned, and freed with the tensor."""
    if sum(sizes) != len(body):
        raise ValueError(f"the header announces {sum(sizes)} bytes, but {len(body)} follow")
    return [memoryview(body[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
