"""What an engine and a model's process say to each other: a JSON header, then tensors' bytes."""

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from penstock.core.tensors import Buffer, Tensor
from penstock.engines.python.memory import Arena

INLINE_BYTES = 64 * 1024  # of one message's tensors; more is faster through shared memory
MAX_HEADER_BYTES = 16 * 1024 * 1024
TAIL_LINES = 24
TAIL_CHARS = 2000
_PREFIX = struct.Struct("<II")  # bytes of the header, bytes of tensors that follow it
_RECEIVE_BYTES = 64 * 1024


class PeerGone(Exception):
    """The other process has ended, or nothing that it sends can be understood any more."""


@dataclass(slots=True)
class Message:
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


class Channel:
    """One end. Messages go to and fro in turn, so each side has read the other's tensors before it sends its own."""

    def __init__(
        self, connection: socket.socket, outgoing: Arena, incoming: Arena, peer_pidfd: int | None = None
    ) -> None:
        """With the peer's pidfd its end is seen even if a process that it made still holds its socket."""
        connection.setblocking(False)
        self._connection = connection
        self._fd = connection.fileno()
        self._outgoing, self._incoming = outgoing, incoming
        self._received = bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._writable.register(self._fd, select.POLLOUT)
        if peer_pidfd is not None:
            self._readable.register(peer_pidfd, select.POLLIN)
            self._writable.register(peer_pidfd, select.POLLIN)

    def send(self, message: Message, deadline: float = inf) -> None:
        """Raises TimeoutError where nothing of it was sent, so that the next message can be."""
        data = [tensor.data for tensor in message.tensors]
        size = sum(len(part) for part in data)
        is_shared = size > INLINE_BYTES
        if is_shared:
            self._outgoing.write(data)
        tensors = [(tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in message.tensors]
        header = json.dumps({"kind": message.kind, "fields": message.fields, "tensors": tensors}).encode()
        if is_shared:
            self._send_all(_PREFIX.pack(len(header), 0) + header, deadline)
        else:
            self._send_all(b"".join((_PREFIX.pack(len(header), size), header, *data)), deadline)

    def receive(self, deadline: float = inf) -> Message:
        header_size, body_size = _PREFIX.unpack(self._take(_PREFIX.size, deadline))
        if header_size > MAX_HEADER_BYTES or body_size > INLINE_BYTES:
            raise PeerGone("it sent what is no message")
        header = self._take(header_size, deadline)
        body = self._take(body_size, deadline)
        try:
            return self._decode(json.loads(header), body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PeerGone("it sent what is no message") from error

    def _decode(self, header: dict[str, Any], body: bytearray) -> Message:
        sizes = [size for _, _, _, size in header["tensors"]]
        is_shared = sum(sizes) > INLINE_BYTES
        data: Sequence[Buffer] = self._incoming.read(sizes) if is_shared else _cut(body, sizes)
        tensors = [
            Tensor(name, datatype, tuple(shape), part)
            for (name, datatype, shape, _), part in zip(header["tensors"], data, strict=True)
        ]
        return Message(header["kind"], dict(header["fields"]), tensors)

    def _send_all(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._connection.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                try:
                    self._wait(self._writable, deadline)
                except TimeoutError:
                    if len(left) < len(data):
                        raise PeerGone("it stopped reading") from None
                    raise
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGone("it has closed its socket") from error

    def _take(self, count: int, deadline: float) -> bytearray:
        received = self._received
        while len(received) < count:
            self._wait(self._readable, deadline)
            try:
                chunk = self._connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise PeerGone("it has closed its socket")
            received += chunk
        taken = received[:count]
        del received[:count]
        return taken

    def _wait(self, poll: "select.poll", deadline: float) -> None:
        timeout_ms = None if deadline == inf else max(0.0, deadline - time.monotonic()) * 1000
        ready = poll.poll(timeout_ms)
        if not ready:
            raise TimeoutError
        # What it said before its end is still to be read.
        if all(fd != self._fd for fd, _ in ready):
            raise PeerGone("it has ended")


def _cut(body: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Each in memory of its own: aligned, and kept only as long as it is used."""
    if sum(sizes) != len(body):
        raise ValueError(f"{sum(sizes)} bytes were announced, {len(body)} are there")
    found = []
    at = 0
    for size in sizes:
        found.append(memoryview(body[at : at + size]))
        at += size
    return found


def tail(text: str) -> str:
    """The last lines, which say most of a traceback, within what an error message may hold."""
    kept = "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
    return kept if len(kept) <= TAIL_CHARS else f"…{kept[1 - TAIL_CHARS :]}"
