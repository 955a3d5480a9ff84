"""Sockets that work like ZeroMQ's ROUTER and DEALER, over unix sockets."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.core.tensors import Buffer
from penstock.wire.unix.unix_stream import MAX_WAITING_BUFFERS, BufferPool, UnixStream

IPC_PREFIX = "ipc://"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5  # between two attempts to connect
BACKLOG = 1024

log = structlog.get_logger()


class UnixRouter:
    """Accepts connections from many peers. The first message of each peer is its identity."""

    def __init__(self, handler: Callable[[bytes, list[Buffer]], None], max_message_bytes: int) -> None:
        self._handler = handler
        self._max_bytes = max_message_bytes
        self._listener: socket.socket | None = None
        self._file = Path()
        self._memory = BufferPool()
        self._streams: set[UnixStream] = set()
        self._streams_by_identity: dict[bytes, UnixStream] = {}  # by identity

    def bind(self, endpoint: str) -> str:
        self._file = Path(endpoint.removeprefix(IPC_PREFIX))
        self._file.unlink(missing_ok=True)
        listening = _create_unix_socket()
        try:
            listening.bind(str(self._file))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror or error}; choose another --bind"
            ) from error
        self._listener = listening
        self._listen()
        return endpoint

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def unbind(self, endpoint: str) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._file.unlink(missing_ok=True)

    def send(self, identity: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message to a peer; return False if no peer has this identity or the peer's queue is full."""
        stream = self._streams_by_identity.get(identity)
        return stream is not None and stream.send(parts)

    def close(self, linger_ms: int) -> None:
        self.unbind(str(self._file))
        for stream in tuple(self._streams):
            stream.flush(linger_ms / 1000)
            stream.close()
        self._streams.clear()
        self._streams_by_identity.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # usually no descriptor is free: try again later
            log.warning("connection_not_accepted", error=error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(LONGEST_PAUSE_S, self._listen)
            return
        self._streams.add(UnixStream(connected, self._on_message, self._on_end, self._memory, self._max_bytes))

    def _on_message(self, stream: UnixStream, parts: list[Buffer]) -> None:
        if stream.identity is not None:
            self._handler(stream.identity, parts)
            return
        stream.identity = identity = b"".join(parts[:1])
        before = self._streams_by_identity.get(identity)
        self._streams_by_identity[identity] = stream
        if before is not None:  # the peer reconnected before the end of its old connection was seen
            self._streams.discard(before)
            before.close()

    def _on_end(self, stream: UnixStream) -> None:
        self._streams.discard(stream)
        if stream.identity is not None and self._streams_by_identity.get(stream.identity) is stream:
            del self._streams_by_identity[stream.identity]


class UnixDealer:
    """Connects to a UnixRouter, and reconnects automatically. Queues messages until the connection is open."""

    def __init__(self, handler: Callable[[list[Buffer]], None], identity: bytes) -> None:
        self._handler = handler
        self._identity = identity
        self._file = ""
        self._memory = BufferPool()
        self._stream: UnixStream | None = None
        self._unsent: deque[Sequence[Buffer]] = deque()
        self._pause_s = FIRST_PAUSE_S
        self._next_attempt: asyncio.TimerHandle | None = None
        self._is_closed = False

    def connect(self, endpoint: str) -> None:
        self._file = endpoint.removeprefix(IPC_PREFIX)
        self._connect()

    def send(self, parts: Sequence[Buffer]) -> bool:
        if self._stream is not None:
            return self._stream.send(parts)
        if self._is_closed or len(self._unsent) >= MAX_WAITING_BUFFERS:
            return False
        self._unsent.append(parts)
        return True

    def close(self, linger_ms: int) -> None:
        self._is_closed = True
        if self._next_attempt is not None:
            self._next_attempt.cancel()
        if self._stream is not None:
            self._stream.flush(linger_ms / 1000)
            self._stream.close()
            self._stream = None
        self._unsent.clear()

    def _connect(self) -> None:
        connecting = _create_unix_socket()
        try:
            connecting.connect(self._file)  # does not block with a unix socket
        except OSError:
            connecting.close()
            self._next_attempt = asyncio.get_running_loop().call_later(self._pause_s, self._connect)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return
        self._pause_s = FIRST_PAUSE_S
        self._stream = stream = UnixStream(connecting, self._on_message, self._on_end, self._memory)
        stream.send([self._identity])
        while self._unsent and stream.is_open:
            stream.send(self._unsent.popleft())

    def _on_message(self, stream: UnixStream, parts: list[Buffer]) -> None:
        self._handler(parts)

    def _on_end(self, stream: UnixStream) -> None:
        self._stream = None
        if not self._is_closed:
            self._connect()


def _create_unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made
