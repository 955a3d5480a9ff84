"""One end of a connection between two processes of one machine, for a thread that may block."""

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from math import inf

from penstock.core.errors import WireError
from penstock.wire.ipc.arena import Arena
from penstock.wire.ipc.ipc_messages import Envelope, Inbox, Message

_RECEIVE_BYTES = 64 * 1024


class PeerGone(Exception):
    """The other process has ended, or has sent an invalid message, after which the connection is unusable.

    The text is the reason in a longer message, which says whose process ended.
    """


class IpcChannel:
    """Sends and receives messages. Each slot carries one exchange at a time, with shared memory for each direction.

    Within a slot, both sides alternate: a side reads the tensors that it received before it sends the next ones.
    """

    def __init__(
        self,
        connection: socket.socket,
        outgoing: Sequence[Arena],
        incoming: Sequence[Arena],
        peer_pidfd: int | None = None,
    ) -> None:
        """Arenas are in the order of slots. `peer_pidfd` reports the peer's end, even if its child holds the socket."""
        connection.setblocking(False)
        self._connection = connection
        self._fd = connection.fileno()
        self._outgoing, self._incoming = outgoing, incoming
        self._inbox = Inbox()
        self._received: deque[Envelope] = deque()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._writable.register(self._fd, select.POLLOUT)
        if peer_pidfd is not None:
            self._readable.register(peer_pidfd, select.POLLIN)
            self._writable.register(peer_pidfd, select.POLLIN)

    def send(self, message: Message, deadline: float = inf) -> None:
        """Send a message. Raise TimeoutError if no byte was sent in time; the channel then stays usable."""
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
                        raise PeerGone("the process stopped reading messages") from None
                    raise
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGone("the process has closed its socket") from error

    def receive(self, deadline: float = inf) -> Message:
        try:
            while not self._received:
                self._received += self._inbox.feed(self._receive_some(deadline))
            envelope = self._received.popleft()
            return envelope.open(self._incoming[envelope.slot])
        except (WireError, IndexError, TypeError) as error:
            raise PeerGone("the process sent an invalid message") from error

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
                raise PeerGone("the process has closed its socket")
            return chunk

    def _wait(self, poll: "select.poll", deadline: float) -> None:
        timeout_ms = None if deadline == inf else max(0.0, deadline - time.monotonic()) * 1000
        ready = poll.poll(timeout_ms)
        if not ready:
            raise TimeoutError
        # Messages that the process sent before it ended are still read.
        if all(fd != self._fd for fd, _ in ready):
            raise PeerGone("the process has ended")
