"""One end of a connection between two processes of one machine, for a thread that may wait."""

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from math import inf

from penstock.core.errors import WireError
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.messages import Envelope, Inbox, Message

_RECEIVE_BYTES = 64 * 1024


class PeerGone(Exception):
    """The other process has ended, or nothing that it sends can be understood any more."""


class Channel:
    """Within a slot messages go to and fro in turn: each side has read the other's tensors before it sends its own."""

    def __init__(
        self,
        connection: socket.socket,
        outgoing: Sequence[Arena],
        incoming: Sequence[Arena],
        peer_pidfd: int | None = None,
    ) -> None:
        """Arenas by slot. With its pidfd the peer's end is seen even if a process that it made holds its socket."""
        connection.setblocking(False)
        self._connection = connection
        self._fd = connection.fileno()
        self._outgoing, self._incoming = outgoing, incoming
        self._inbox = Inbox()
        self._arrived: deque[Envelope] = deque()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._writable.register(self._fd, select.POLLOUT)
        if peer_pidfd is not None:
            self._readable.register(peer_pidfd, select.POLLIN)
            self._writable.register(peer_pidfd, select.POLLIN)

    def send(self, message: Message, deadline: float = inf) -> None:
        """Raises TimeoutError where nothing of it was sent, so that the next message can be."""
        data = message.pack(self._outgoing[message.slot])
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

    def receive(self, deadline: float = inf) -> Message:
        try:
            while not self._arrived:
                self._arrived += self._inbox.feed(self._receive_some(deadline))
            envelope = self._arrived.popleft()
            return envelope.open(self._incoming[envelope.slot])
        except (WireError, IndexError, TypeError) as error:
            raise PeerGone("it sent what is no message") from error

    def _receive_some(self, deadline: float) -> bytes:
        while True:
            self._wait(self._readable, deadline)
            try:
                chunk = self._connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise PeerGone("it has closed its socket")
            return chunk

    def _wait(self, poll: "select.poll", deadline: float) -> None:
        timeout_ms = None if deadline == inf else max(0.0, deadline - time.monotonic()) * 1000
        ready = poll.poll(timeout_ms)
        if not ready:
            raise TimeoutError
        # What it said before its end is still to be read.
        if all(fd != self._fd for fd, _ in ready):
            raise PeerGone("it has ended")
