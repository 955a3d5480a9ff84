"""Carries clients' connections to the native front and back, over a unix socket.

The front writes each answer in two pieces, and its client wakes for both. What it has written by the time that the
event loop turns, of many calls mostly, leaves here as one piece.
"""

import asyncio
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import structlog

from penstock.wire.tcp_connections import own_sockets

log = structlog.get_logger()
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
PAUSE_S = 0.5  # where there are no files for another connection
READ_BYTES = 256 * 1024
HELD_BYTES = 4 * 1024 * 1024  # that the system holds of what one side has not read, in time; it may give less
LARGE_BYTES = 128 * 1024  # at once: more than it holds without being asked to
WIDEN_S = 1.0
FILES = 3  # that a connection takes: the client's, and both ends of the one to the front


class Relay:
    def __init__(self, path: Path) -> None:
        """`path` is the front's socket, to which nobody else connects."""
        self._path = path
        self._listening: list[socket.socket] = []
        self._pairs: set[_Pair] = set()
        self._last_number = 0
        self._widen_from = 0.0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.buffer = memoryview(bytearray(READ_BYTES))  # of whoever reads; nothing is left in it
        self.peers: dict[str, str] = {}  # clients as gRPC writes them, by what the front calls their connections

    async def open(self, host: str, port: int, is_port_shared: bool, last_number: int) -> int:
        """Returns the port. `last_number`: of the front's last connection, which numbers them as they come."""
        self._last_number = last_number
        self._loop = asyncio.get_running_loop()
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            is_both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
            place = (str(address[0]), port)
            try:
                listening = socket.create_server(
                    place, family=family, backlog=BACKLOG, reuse_port=is_port_shared, dualstack_ipv6=is_both
                )
            except OSError:
                self.stop_listening()
                raise
            listening.setblocking(False)
            self._listening.append(listening)
            port = listening.getsockname()[1]
            self._listen(listening)
        return port

    def stop_listening(self) -> None:
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self._listening.clear()

    async def close(self, patience_s: float) -> None:
        """Clients have so long to take what the front said last."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), patience_s)
        for pair in tuple(self._pairs):
            pair.close()
        self._path.unlink(missing_ok=True)

    def _listen(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no more files, mostly
                log.warning("grpc_connection_refused", error=error.strerror)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(PAUSE_S, self._listen, listening)
                return
            self._enter(client)

    def _enter(self, client: socket.socket) -> None:
        """Connects it to the front at once, so that they come there in this order."""
        front: socket.socket | None = None
        try:
            peer = _peer(client)
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            front = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            front.setblocking(False)
            front.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
            front.connect(str(self._path))
        except OSError as error:  # the client has left, or the front has too many that it has not taken
            log.warning("grpc_connection_refused", error=error.strerror)
            client.close()
            if front is not None:
                front.close()
            return
        self._last_number += 1
        name = f"unix:{self._last_number}"
        self.peers[name] = peer
        self._is_empty.clear()
        self._pairs.add(_Pair(self, name, client, front, self._loop))

    def widen(self) -> bool:
        """The front's own ends, of which it tells nothing, hold as much as ours: of all that have been accepted. False:
        not now, as it looks at all files of the process."""
        if self._loop.time() < self._widen_from:
            return False
        self._widen_from = self._loop.time() + WIDEN_S
        with ExitStack() as stack:
            for opened in own_sockets(stack):
                if opened.family == socket.AF_UNIX and opened.getsockname() == str(self._path):
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
        return True

    def left(self, pair: "_Pair", name: str) -> None:
        del self.peers[name]
        self._pairs.discard(pair)
        if not self._pairs:
            self._is_empty.set()


class _Pair:
    """A client's connection and its own to the front: what comes from one goes to the other, no faster than that
    takes it."""

    def __init__(
        self, relay: Relay, name: str, client: socket.socket, front: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._relay = relay
        self._name = name
        self._sockets = (client, front)
        self._loop = loop
        self._is_open = True
        self._is_wide = False
        loop.add_reader(client.fileno(), self._carry, client, front)
        loop.add_reader(front.fileno(), self._carry, front, client)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        buffer = self._relay.buffer
        try:
            count = source.recv_into(buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        if count > LARGE_BYTES and not self._is_wide:
            self._is_wide = self._relay.widen()
        if (sent := self._send(target, buffer[:count])) < count and self._is_open:
            # Nothing more is read before it has gone.
            self._loop.remove_reader(source.fileno())
            self._go_on(source, target, memoryview(bytes(buffer[sent:count])))

    def _go_on(self, source: socket.socket, target: socket.socket, left: memoryview) -> None:
        if self._is_open:
            self._loop.add_writer(target.fileno(), self._flush, source, target, left)

    def _flush(self, source: socket.socket, target: socket.socket, left: memoryview) -> None:
        sent = self._send(target, left)
        if self._is_open and sent == len(left):
            self._loop.remove_writer(target.fileno())
            self._loop.add_reader(source.fileno(), self._carry, source, target)
        else:
            self._go_on(source, target, left[sent:])

    def _send(self, target: socket.socket, data: memoryview) -> int:
        try:
            return target.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            for each in self._sockets:
                self._loop.remove_reader(each.fileno())
                self._loop.remove_writer(each.fileno())
                each.close()
            self._relay.left(self, self._name)


def _peer(client: socket.socket) -> str:
    """As gRPC writes it."""
    host, port = client.getpeername()[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
