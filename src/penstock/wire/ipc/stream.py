"""A connection between two processes of one machine: a unix socket that carries whole messages of several frames.

The event loop reads and writes it itself. With ZeroMQ a message wakes a thread on either side, too, and each of them
waits for a core where models keep all of them busy.
"""

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

READ_BYTES = 256 * 1024  # what is larger has memory of its own
READS_AT_ONCE = 16  # before other work gets its turn on the loop
HELD_BYTES = 4 * 1024 * 1024  # that the system holds of what a peer has not read; it may give less
FREE_BYTES = 16 * 1024 * 1024  # memory for large messages that waits to be used again
MOST_FRAMES = 65_536
HEADS_BYTES = 64 * 1024  # of a message, beside what a bound on it is meant for
MOST_PARTS = 512  # that the system takes at once
# Credits bound what is in flight to a peer far below this.
MOST_WAITING = 100_000
_HEAD = struct.Struct("<IQ")  # how many frames there are, and the bytes of the whole; then the length of each frame
_LENGTH_BYTES = 8
_ALIGNED = 16  # each frame begins at a multiple of it, as arrays should
_GAPS = [bytes(count) for count in range(_ALIGNED)]

log = structlog.get_logger()

Handler = Callable[["Stream", list[Buffer]], None]


def encode(frames: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """A message's parts, and their bytes together."""
    sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
    head_bytes = _HEAD.size + _LENGTH_BYTES * len(sizes)
    whole = head_bytes + -head_bytes % _ALIGNED + sum([size + -size % _ALIGNED for size in sizes])
    head = struct.pack(f"<IQ{len(sizes)}Q", len(sizes), whole, *sizes)
    parts: list[Buffer] = [head + _GAPS[-head_bytes % _ALIGNED]]
    for frame, size in zip(frames, sizes, strict=True):
        parts.append(frame)
        if gap := -size % _ALIGNED:
            parts.append(_GAPS[gap])
    return parts, whole


def decode(message: memoryview) -> list[Buffer]:
    """Its frames; raises ValueError where they are not as long as the message is."""
    count, whole = _HEAD.unpack_from(message)
    start = _HEAD.size + _LENGTH_BYTES * count
    start += -start % _ALIGNED
    frames: list[Buffer] = []
    if start <= whole:
        for size in struct.unpack_from(f"<{count}Q", message, _HEAD.size):
            frames.append(message[start : start + size])
            start += size + -size % _ALIGNED
    if start != whole:
        raise ValueError("its frames are not as long as it is")
    return frames


class Memory:
    """For large messages: what nobody refers to any more is used again, as new memory costs more than to fill it."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self, size: int) -> memoryview:
        whole = self._unused(size)
        lent = whole[:size]
        weakref.finalize(lent, self._give_back, whole).atexit = False  # in whichever thread lets go of it
        return lent.data

    def _unused(self, size: int) -> Array:
        for index, whole in enumerate(self._free):
            if whole.nbytes >= size:
                return self._free.pop(index)
        return np.empty(size, np.uint8)

    def _give_back(self, whole: Array) -> None:
        if sum([each.nbytes for each in self._free]) + whole.nbytes <= FREE_BYTES:
            self._free.append(whole)


class Stream:
    """One connection, over which whole messages go both ways."""

    def __init__(
        self,
        connected: socket.socket,
        handler: Handler,
        on_end: Callable[["Stream"], None],
        memory: Memory,
        max_message_bytes: int = -1,
    ) -> None:
        """`handler` and `on_end` are called on the event loop; a negative bound is none."""
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
        self.identity: bytes | None = None  # of the peer, once it is told
        self.is_open = True
        self._socket = connected
        self._max_bytes = max_message_bytes
        self._handler = handler
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._small = memoryview(bytearray(READ_BYTES))
        self._into = self._small  # a message that is larger has memory of its own
        self._have = 0  # bytes there
        self._waiting: deque[memoryview] = deque()  # to be written
        self._loop.add_reader(connected.fileno(), self._read)

    # --- out

    def send(self, frames: Sequence[Buffer]) -> bool:
        """False: it takes no more."""
        if not self.is_open or len(self._waiting) > MOST_WAITING:
            return False
        parts, size = encode(frames)
        sent = 0
        if not self._waiting and len(parts) <= MOST_PARTS:
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                pass
            except OSError:
                self._loop.call_soon(self._end)  # whoever sends hears of it later, and not within
                return False
            if sent == size:
                return True
        self._put(parts, sent)
        return True

    def _put(self, parts: Sequence[Buffer], sent: int) -> None:
        """What is left of them after so many bytes is written as the peer takes it."""
        is_first = not self._waiting
        for part in parts:
            view = memoryview(part).cast("B")
            if sent < view.nbytes:
                self._waiting.append(view[sent:])
            sent = max(0, sent - view.nbytes)
        if is_first:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _write(self) -> None:
        waiting = self._waiting
        try:
            sent = self._socket.sendmsg([waiting[index] for index in range(min(len(waiting), MOST_PARTS))])
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
        """Blocks for so long where the peer does not take the last of it."""
        if self.is_open and self._waiting:
            self._socket.settimeout(seconds)
            with suppress(OSError):  # it has gone, or takes nothing
                self._socket.sendall(b"".join(self._waiting))

    # --- in

    def _read(self) -> None:
        for _ in range(READS_AT_ONCE):
            room = self._into[self._have :]
            try:
                count = self._socket.recv_into(room)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._end()
                return
            self._have += count
            if self._into is not self._small:
                self._take_large()
            else:
                self._take_small()
                if count < len(room) and self._into is self._small:  # that was all
                    return
            if not self.is_open:
                return

    def _take_large(self) -> None:
        whole = self._into
        if self._have == len(whole):
            self._into, self._have = self._small, 0
            self._give(whole)

    def _take_small(self) -> None:
        """Whole messages leave; what is left of one is moved to the front, or to memory that has room for all of it."""
        small, start, end = self._small, 0, self._have
        self._have = 0
        while self.is_open and end - start >= _HEAD.size:
            count, size = _HEAD.unpack_from(small, start)
            if count > MOST_FRAMES or size < _HEAD.size or 0 <= self._max_bytes < size - HEADS_BYTES:
                self._refuse("it is none, or too large")
                return
            if end - start < size:
                if size > READ_BYTES:
                    self._begin_large(size, small[start:end])
                    return
                break
            self._give(memoryview(bytes(small[start : start + size])))
            start += size
        self._have = end - start
        if start:
            small[: self._have] = small[start:end].tobytes()

    def _begin_large(self, size: int, begun: memoryview) -> None:
        try:
            self._into = self._memory.take(size)
        except (MemoryError, ValueError):
            self._refuse("there is no memory for it")
            return
        self._into[: len(begun)] = begun
        self._have = len(begun)

    def _refuse(self, why: str) -> None:
        log.warning("wire_error", error=f"a message over a socket of this machine is not taken: {why}")
        self._end()

    def _give(self, message: memoryview) -> None:
        try:
            frames = decode(message)
        except (ValueError, struct.error) as error:
            self._refuse(str(error))
            return
        try:
            self._handler(self, frames)
        except Exception as error:  # noqa: BLE001 - one message that a handler fails on must not hold up those behind it
            self._loop.call_exception_handler({"message": "a message was not handled", "exception": error})

    # --- the end

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
