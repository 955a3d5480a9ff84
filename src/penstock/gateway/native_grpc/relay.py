"""Relay bytes between clients' TCP connections and the native server's unix socket.

The native server writes each answer in two pieces, and each piece wakes the client. The relay sends all that has been
written until the event loop reads it, often answers of many calls, as one piece.
"""

import asyncio
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.telemetry.repeated_log import RepeatedLog
from penstock.wire.tcp_connections import iterate_own_sockets

BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
ACCEPT_PAUSE_S = 0.5  # before the next attempt to accept, if there are no files left
READ_BYTES = 256 * 1024
HELD_BYTES = 4 * 1024 * 1024  # size of the widened socket buffers; the system may give less
LARGE_BYTES = 128 * 1024  # a read of more bytes widens the buffers, because it exceeds the default buffer
WIDEN_S = 1.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the first bytes of every HTTP/2 client
FILES_PER_CONNECTION = (
    3  # open files per connection: the client's socket, and both ends of the connection to the native server
)


class Relay:
    def __init__(self, path: Path, max_connections: int) -> None:
        """Create a relay. `path` is the native server's socket; no other process connects to it."""
        self._path = path
        self._max_connections = max_connections
        self._refused = RepeatedLog("grpc_connection_refused")
        self._listening: list[socket.socket] = []
        self._pairs: set[_Pair] = set()
        self._last_number = 0
        self._widen_from = 0.0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.buffer = memoryview(bytearray(READ_BYTES))  # shared by all reads, empty between them
        self.peers: dict[str, str] = {}  # clients by the native server's names

    async def open(self, host: str, port: int, is_port_shared: bool, last_number: int) -> int:
        """Listen, and return the port. `last_number`: the native server's number of its last connection."""
        self._last_number = last_number
        self._loop = asyncio.get_running_loop()
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            is_both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
            bind_address = (str(address[0]), port)
            try:
                listening = socket.create_server(
                    bind_address, family=family, backlog=BACKLOG, reuse_port=is_port_shared, dualstack_ipv6=is_both
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
        """Close all connections, after up to `patience_s` for clients to read the last answers."""
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
            except OSError as error:  # usually, because no more files can be opened
                self._refused.add(error=error.strerror)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._listen, listening)
                return
            self._connect_client(client)

    def _connect_client(self, client: socket.socket) -> None:
        """Connect a client to the native server at once, so that the server numbers connections in order of arrival.

        A connection over the limit is closed, because each connection uses FILES of the limited open files.
        """
        if len(self._pairs) >= self._max_connections:
            self._refused.add(error=f"there are {self._max_connections} connections (limits.max_connections)")
            client.close()
            return
        native: socket.socket | None = None
        try:
            peer = _format_peer(client)
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            native = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            native.setblocking(False)
            native.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
            native.connect(str(self._path))
        except OSError as error:  # the client has left, or the native server's backlog is full
            self._refused.add(error=error.strerror)
            client.close()
            if native is not None:
                native.close()
            return
        self._last_number += 1
        name = f"unix:{self._last_number}"
        self.peers[name] = peer
        self._is_empty.clear()
        self._pairs.add(_Pair(self, name, client, native, self._loop))

    def widen_buffers(self) -> bool:
        """Widen the buffers of the native server's own sockets.

        Do nothing and return False less than WIDEN_S after the last call, because this checks all files of the process.
        """
        if self._loop.time() < self._widen_from:
            return False
        self._widen_from = self._loop.time() + WIDEN_S
        with ExitStack() as stack:
            for opened in iterate_own_sockets(stack):
                if opened.family == socket.AF_UNIX and opened.getsockname() == str(self._path):
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
        return True

    def forget_pair(self, pair: "_Pair", name: str) -> None:
        del self.peers[name]
        self._pairs.discard(pair)
        if not self._pairs:
            self._is_empty.set()


class _Pair:
    """A client's connection, and the connection to the native server that belongs to it.

    Bytes from each connection are forwarded to the other one, as fast as its peer reads.
    """

    def __init__(
        self, relay: Relay, name: str, client: socket.socket, native: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._relay = relay
        self._name = name
        self._sockets = (client, native)
        self._loop = loop
        self._is_open = True
        self._has_wide_buffers = False
        loop.add_reader(client.fileno(), self._check_preface, client, native)
        loop.add_reader(native.fileno(), self._forward, native, client)

    def _check_preface(self, client: socket.socket, native: socket.socket) -> None:
        """Close the connection if its client does not speak HTTP/2, because the native server may keep it open."""
        try:
            first = client.recv(len(PREFACE), socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first or not PREFACE.startswith(first):
            self.close()
            return
        self._loop.add_reader(client.fileno(), self._forward, client, native)
        self._forward(client, native)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
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
        if count > LARGE_BYTES and not self._has_wide_buffers:
            self._has_wide_buffers = self._relay.widen_buffers()
        if (sent := self._send(target, buffer[:count])) < count and self._is_open:
            # Read no more before the rest is sent.
            self._loop.remove_reader(source.fileno())
            self._flush_later(source, target, memoryview(bytes(buffer[sent:count])))

    def _flush_later(self, source: socket.socket, target: socket.socket, unsent: memoryview) -> None:
        if self._is_open:
            self._loop.add_writer(target.fileno(), self._flush, source, target, unsent)

    def _flush(self, source: socket.socket, target: socket.socket, unsent: memoryview) -> None:
        sent = self._send(target, unsent)
        if self._is_open and sent == len(unsent):
            self._loop.remove_writer(target.fileno())
            self._loop.add_reader(source.fileno(), self._forward, source, target)
        else:
            self._flush_later(source, target, unsent[sent:])

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
            self._relay.forget_pair(self, self._name)


def _format_peer(client: socket.socket) -> str:
    """Return the client's address in gRPC's notation."""
    host, port = client.getpeername()[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
