"""What ZeroMQ's ROUTER and DEALER do, between processes of one machine."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.core.tensors import Buffer
from penstock.wire.ipc.stream import MOST_WAITING, Memory, Stream

IPC = "ipc://"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5  # between two attempts to connect
BACKLOG = 1024

log = structlog.get_logger()


class LocalRouter:
    """Listens; many peers, each known by the identity that it tells first."""

    def __init__(self, handler: Callable[[bytes, list[Buffer]], None], max_message_bytes: int) -> None:
        self._handler = handler
        self._max_bytes = max_message_bytes
        self._listening: socket.socket | None = None
        self._file = Path()
        self._memory = Memory()
        self._streams: set[Stream] = set()
        self._known: dict[bytes, Stream] = {}

    def bind(self, endpoint: str) -> str:
        self._file = Path(endpoint.removeprefix(IPC))
        self._file.unlink(missing_ok=True)
        listening = _unix_socket()
        try:
            listening.bind(str(self._file))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror or error}; choose another --bind"
            ) from error
        self._listening = listening
        self._listen()
        return endpoint

    def _listen(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept)

    def unbind(self, endpoint: str) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None
            self._file.unlink(missing_ok=True)

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        """False: nobody of that identity is connected, or it takes no more."""
        stream = self._known.get(identity)
        return stream is not None and stream.send(frames)

    def close(self, linger_ms: int) -> None:
        self.unbind(str(self._file))
        for stream in tuple(self._streams):
            stream.flush(linger_ms / 1000)
            stream.close()
        self._streams.clear()
        self._known.clear()

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no more files, mostly
            log.warning("wire_error", error=f"a connection of this machine is not taken: {error.strerror}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listening.fileno())
            loop.call_later(LONGEST_PAUSE_S, self._listen)
            return
        self._streams.add(Stream(connected, self._heard, self._ended, self._memory, self._max_bytes))

    def _heard(self, stream: Stream, frames: list[Buffer]) -> None:
        if stream.identity is not None:
            self._handler(stream.identity, frames)
            return
        stream.identity = identity = b"".join(frames[:1])
        before = self._known.get(identity)
        self._known[identity] = stream
        if before is not None:  # it is back before its end was seen
            self._streams.discard(before)
            before.close()

    def _ended(self, stream: Stream) -> None:
        self._streams.discard(stream)
        if stream.identity is not None and self._known.get(stream.identity) is stream:
            del self._known[stream.identity]


class LocalDealer:
    """Connects, and again by itself where that ends; what is said before it is connected is kept."""

    def __init__(self, handler: Callable[[list[Buffer]], None], identity: bytes) -> None:
        self._handler = handler
        self._identity = identity
        self._file = ""
        self._memory = Memory()
        self._stream: Stream | None = None
        self._unsaid: deque[Sequence[Buffer]] = deque()
        self._pause_s = FIRST_PAUSE_S
        self._next: asyncio.TimerHandle | None = None
        self._is_closed = False

    def connect(self, endpoint: str) -> None:
        self._file = endpoint.removeprefix(IPC)
        self._connect()

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self._stream is not None:
            return self._stream.send(frames)
        if self._is_closed or len(self._unsaid) >= MOST_WAITING:
            return False
        self._unsaid.append(frames)
        return True

    def close(self, linger_ms: int) -> None:
        self._is_closed = True
        if self._next is not None:
            self._next.cancel()
        if self._stream is not None:
            self._stream.flush(linger_ms / 1000)
            self._stream.close()
            self._stream = None
        self._unsaid.clear()

    def _connect(self) -> None:
        connecting = _unix_socket()
        try:
            connecting.connect(self._file)  # at once, or not at all
        except OSError:
            connecting.close()
            self._next = asyncio.get_running_loop().call_later(self._pause_s, self._connect)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return
        self._pause_s = FIRST_PAUSE_S
        self._stream = stream = Stream(connecting, self._heard, self._ended, self._memory)
        stream.send([self._identity])
        while self._unsaid and stream.is_open:
            stream.send(self._unsaid.popleft())

    def _heard(self, stream: Stream, frames: list[Buffer]) -> None:
        self._handler(frames)

    def _ended(self, stream: Stream) -> None:
        self._stream = None
        if not self._is_closed:
            self._connect()


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made
