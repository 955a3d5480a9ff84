"""A unix socket that carries messages of several parts, read and written by the event loop itself."""

import asyncio
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import structlog

from penstock.core.tensors import Array, Buffer

READ_BYTES = 256 * 1024  # larger messages are read into separate memory
READS_AT_ONCE = 16  # before the event loop runs other work
SEND_BUFFER_BYTES = 4 * 1024 * 1024  # requested from the system, which may give less
MAX_POOL_BYTES = 16 * 1024 * 1024  # memory for large messages that is kept to be used again
MAX_PARTS = 65_536
HEADERS_BYTES = 64 * 1024  # by which a message may exceed the limit, for its head and header
MAX_IOV = 512  # buffers per `sendmsg`
# Buffers that may wait for one peer. Credits keep the number far below this.
MAX_WAITING_BUFFERS = 100_000
_HEAD = struct.Struct("<IQ")  # the number of parts, and the bytes of the whole message; the length of each part follows
_LENGTH_BYTES = 8
_ALIGNMENT = 16  # each part starts at a multiple of this, as arrays should
_GAPS = [bytes(count) for count in range(_ALIGNMENT)]

log = structlog.get_logger()

Handler = Callable[["UnixStream", list[Buffer]], None]


def encode(parts: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the buffers to send for a message of these parts, and the buffers' total size in bytes."""
    sizes = [part.nbytes if isinstance(part, memoryview) else len(part) for part in parts]
    head_bytes = _HEAD.size + _LENGTH_BYTES * len(sizes)
    whole = head_bytes + -head_bytes % _ALIGNMENT + sum([size + -size % _ALIGNMENT for size in sizes])
    head = struct.pack(f"<IQ{len(sizes)}Q", len(sizes), whole, *sizes)
    buffers: list[Buffer] = [head + _GAPS[-head_bytes % _ALIGNMENT]]
    for part, size in zip(parts, sizes, strict=True):
        buffers.append(part)
        if gap := -size % _ALIGNMENT:
            buffers.append(_GAPS[gap])
    return buffers, whole


def decode(message: memoryview) -> list[Buffer]:
    """Return the parts of a message. Raises ValueError if the parts' lengths do not add up to the message's length."""
    count, whole = _HEAD.unpack_from(message)
    start = _HEAD.size + _LENGTH_BYTES * count
    start += -start % _ALIGNMENT
    parts: list[Buffer] = []
    if start <= whole:
        for size in struct.unpack_from(f"<{count}Q", message, _HEAD.size):
            parts.append(message[start : start + size])
            start += size + -size % _ALIGNMENT
    if start != whole:
        raise ValueError("the lengths of the parts do not add up to the message's length")
    return parts


class BufferPool:
    """Provides memory for large messages. Reuses unreferenced memory, because new memory costs more than copying."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self, size: int) -> memoryview:
        whole = self._take_free(size)
        lent = whole[:size]
        weakref.finalize(
            lent, self._return_to_pool, whole
        ).atexit = False  # runs in the thread that drops the last reference
        return lent.data

    def _take_free(self, size: int) -> Array:
        for index, whole in enumerate(self._free):
            if whole.nbytes >= size:
                return self._free.pop(index)
        return np.empty(size, np.uint8)

    def _return_to_pool(self, memory: Array) -> None:
        if sum([each.nbytes for each in self._free]) + memory.nbytes <= MAX_POOL_BYTES:
            self._free.append(memory)


class UnixStream:
    """A connection that carries whole messages in both directions."""

    def __init__(
        self,
        connected: socket.socket,
        handler: Handler,
        on_end: Callable[["UnixStream"], None],
        memory: BufferPool,
        max_message_bytes: int = -1,
    ) -> None:
        """Read from a connected socket, calling `handler` and `on_end`. `max_message_bytes` -1 means no limit."""

        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.identity: bytes | None = None  # of the peer, once received
        self.is_open = True
        self._socket = connected
        self._max_bytes = max_message_bytes
        self._handler = handler
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._small_buffer = memoryview(bytearray(READ_BYTES))
        self._buffer = self._small_buffer  # replaced while a larger message is read
        self._received_bytes = 0  # bytes in `_buffer`
        self._waiting: deque[memoryview] = deque()  # buffers to be written
        self._loop.add_reader(connected.fileno(), self._read)

    # --- sending

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send a message; return False if the connection is closed or its queue is full."""
        if not self.is_open or len(self._waiting) > MAX_WAITING_BUFFERS:
            return False
        buffers, size = encode(parts)
        sent = 0
        if not self._waiting and len(buffers) <= MAX_IOV:
            try:
                sent = self._socket.sendmsg(buffers)
            except BlockingIOError:
                pass
            except OSError:
                self._loop.call_soon(self._end)  # later, so that `on_end` does not run within the caller's `send`
                return False
            if sent == size:
                return True
        self._queue(buffers, sent)
        return True

    def _queue(self, buffers: Sequence[Buffer], sent_bytes: int) -> None:
        """Queue the bytes after the first `sent_bytes` bytes; they are written when the peer has read enough."""
        is_first = not self._waiting
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if sent_bytes < view.nbytes:
                self._waiting.append(view[sent_bytes:])
            sent_bytes = max(0, sent_bytes - view.nbytes)
        if is_first:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _write(self) -> None:
        waiting = self._waiting
        try:
            sent = self._socket.sendmsg([waiting[index] for index in range(min(len(waiting), MAX_IOV))])
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.popleft().nbytes
        if sent:
            waiting[0] = waiting[0][sent:]
        if not waiting:
            self._loop.remove_writer(self._socket.fileno())

    def flush(self, seconds: float) -> None:
        """Send all queued bytes; block for at most `seconds`."""
        if self.is_open and self._waiting:
            self._socket.settimeout(seconds)
            with suppress(OSError):  # the peer has gone, or does not read
                self._socket.sendall(b"".join(self._waiting))

    # --- receiving

    def _read(self) -> None:
        for _ in range(READS_AT_ONCE):
            room = self._buffer[self._received_bytes :]
            try:
                count = self._socket.recv_into(room)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._end()
                return
            self._received_bytes += count
            if self._buffer is not self._small_buffer:
                self._finish_large_message()
            else:
                self._read_small_messages()
                if count < len(room) and self._buffer is self._small_buffer:  # the socket is empty
                    return
            if not self.is_open:
                return

    def _finish_large_message(self) -> None:
        whole = self._buffer
        if self._received_bytes == len(whole):
            self._buffer, self._received_bytes = self._small_buffer, 0
            self._deliver(whole)

    def _read_small_messages(self) -> None:
        """Deliver the complete messages; move an incomplete message to the buffer's front, or to a larger buffer."""
        small, start, end = self._small_buffer, 0, self._received_bytes
        self._received_bytes = 0
        while self.is_open and end - start >= _HEAD.size:
            count, size = _HEAD.unpack_from(small, start)
            if count > MAX_PARTS or size < _HEAD.size or 0 <= self._max_bytes < size - HEADERS_BYTES:
                self._end_with_error("invalid or too large")
                return
            if end - start < size:
                if size > READ_BYTES:
                    self._start_large_message(size, small[start:end])
                    return
                break
            self._deliver(memoryview(bytes(small[start : start + size])))
            start += size
        self._received_bytes = end - start
        if start:
            small[: self._received_bytes] = small[start:end].tobytes()

    def _start_large_message(self, size: int, first: memoryview) -> None:
        try:
            self._buffer = self._memory.take(size)
        except (MemoryError, ValueError):
            self._end_with_error(f"no memory for {size} bytes")
            return
        self._buffer[: len(first)] = first
        self._received_bytes = len(first)

    def _end_with_error(self, why: str) -> None:
        log.warning("wire_error", error=f"invalid message on a unix socket: {why}")
        self._end()

    def _deliver(self, message: memoryview) -> None:
        try:
            parts = decode(message)
        except (ValueError, struct.error) as error:
            self._end_with_error(str(error))
            return
        try:
            self._handler(self, parts)
        except Exception as error:  # noqa: BLE001 - a message whose handler fails must not hold up the messages behind it
            self._loop.call_exception_handler({"message": "handling a message failed", "exception": error})

    # --- closing

    def _end(self) -> None:
        if self.is_open:
            self.close()
            self._on_end(self)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._waiting.clear()
