"""Sockets between gateways and workers on an event loop: unix sockets within a machine, ZeroMQ between hosts.

A message is a list of byte buffers, called its parts. This file uses `zmq.backend.Socket`, which is not a public
interface of pyzmq; tests/unit/wire/test_sockets.py fails if a new version of pyzmq changes this class.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.backend import Socket as RawSocket

from penstock.core.errors import ConfigError
from penstock.core.tensors import Buffer
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.unix.unix_sockets import IPC_PREFIX, UnixDealer, UnixRouter
from penstock.wire.zmq_endpoints import TCP_PREFIX, Endpoint, add_key, split_key

# The hot path calls the compiled base class, because the subclass's Python methods cost three times as much.
_send: Any = RawSocket.send
_receive: Any = RawSocket.recv
_get: Any = RawSocket.get
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)

# Parts of at least this size are passed to ZeroMQ without copying; for smaller parts a copy is cheaper.
ZERO_COPY_BYTES = 64 * 1024
# The number of messages that are read before the event loop runs other work.
MAX_READS_AT_ONCE = 64
# Messages that may wait for one peer. Credits keep the number far below this.
HIGH_WATER_MARK = 100_000

# Connections between hosts: time between pings, time after which an unanswered connection is reopened, time to connect.
PING_MS = 1000
PING_TIMEOUT_MS = 4000
CONNECT_TIMEOUT_MS = 1000

RouterHandler = Callable[[bytes, list[Buffer]], None]
DealerHandler = Callable[[list[Buffer]], None]


class _Socket:
    """Reads a ZeroMQ socket on an event loop."""

    def __init__(self, socket_type: int, max_message_bytes: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(socket_type)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.MAXMSGSIZE, max_message_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_drain_due = False

    def _start_reading(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._is_drain_due and self._loop is not None:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        socket = self._socket
        for _ in range(MAX_READS_AT_ONCE):
            if socket.closed or not _get(socket, _EVENTS) & _POLLIN:
                return
            part = _receive(socket, _NOBLOCK, False)
            parts = [part]
            while part.more:
                part = _receive(socket, _NOBLOCK, False)
                parts.append(part)
            try:
                self._receive(parts)
            except Exception:
                self._drain_soon()  # if a message's handler fails, the messages behind it are still read
                raise
        self._drain_soon()

    def _receive(self, parts: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def _send(self, parts: Sequence[Buffer]) -> bool:
        socket, more = self._socket, len(parts)
        try:
            for part in parts:
                more -= 1
                _send(socket, part, _NOBLOCK | _SNDMORE if more else _NOBLOCK, len(part) < ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        # The file descriptor is edge-triggered, and sending may have consumed the event of a received message.
        if not self._is_drain_due and _get(socket, _EVENTS) & _POLLIN:
            self._drain_soon()
        return True

    def close(self, linger_ms: int = 0) -> None:
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger_ms)


class RouterSocket:
    """A gateway's socket, to which many workers connect; each worker is addressed by its identity."""

    def __init__(self, handler: RouterHandler, max_message_bytes: int = -1) -> None:
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._socket: UnixRouter | _ZmqRouter | None = None

    def bind(self, endpoint: Endpoint, keys: CurveKeys | None = None) -> str:
        """Bind the socket and return the endpoint that peers connect to."""
        if endpoint.bind.startswith(IPC_PREFIX):
            self._socket = local = UnixRouter(self._handler, self._max_message_bytes)
            return local.bind(endpoint.bind)
        self._socket = remote = _ZmqRouter(self._handler, self._max_message_bytes)
        return remote.bind(endpoint, keys)

    def unbind(self, endpoint: str) -> None:
        """Stop listening at once; without `unbind`, `close` stops listening only some time later."""
        if self._socket is not None:
            self._socket.unbind(endpoint)

    def send(self, identity: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message to a peer; return False if no peer has this identity or the peer's queue is full."""
        return self._socket is not None and self._socket.send(identity, parts)

    def close(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms)


class DealerSocket:
    """A worker's socket, connected to one gateway."""

    def __init__(self, handler: DealerHandler, identity: bytes) -> None:
        self._handler = handler
        self._identity = identity
        self._socket: UnixDealer | _ZmqDealer | None = None

    def connect(
        self, endpoint: str, on_break: Callable[[], None] = lambda: None, keys: CurveKeys | None = None
    ) -> None:
        """Connect, and reconnect automatically.

        `on_break` is called when a connection to another host breaks, because messages of both sides may be lost.
        """
        if endpoint.startswith(IPC_PREFIX):  # within a machine a connection breaks only when a process ends
            self._socket = local = UnixDealer(self._handler, self._identity)
            local.connect(endpoint)
        else:
            self._socket = remote = _ZmqDealer(self._handler, self._identity)
            remote.connect(endpoint, on_break, keys)

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send a message; return False if the socket is not connected or its queue is full."""
        return self._socket is not None and self._socket.send(parts)

    def close(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms)


class _ZmqRouter(_Socket):
    def __init__(self, handler: RouterHandler, max_message_bytes: int) -> None:
        super().__init__(zmq.ROUTER, max_message_bytes)
        self._handler = handler
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a worker may reconnect before its old connection is seen to be dead

    def bind(self, endpoint: Endpoint, keys: CurveKeys | None) -> str:
        reached = bind(self._socket, endpoint, keys)
        self._start_reading()
        return reached

    def unbind(self, endpoint: str) -> None:
        self._socket.unbind(endpoint)

    def send(self, identity: bytes, parts: Sequence[Buffer]) -> bool:
        return self._send([identity, *parts])

    def _receive(self, parts: list[zmq.Frame]) -> None:
        self._handler(parts[0].bytes, [part.buffer for part in parts[1:]])


class _ZmqDealer(_Socket):
    def __init__(self, handler: DealerHandler, identity: bytes) -> None:
        super().__init__(zmq.DEALER, -1)
        self._handler = handler
        self._socket.set(zmq.IDENTITY, identity)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor: zmq.Socket[bytes] | None = None

    def connect(self, endpoint: str, on_break: Callable[[], None], keys: CurveKeys | None) -> None:
        self._watch_breaks(on_break)
        connect(self._socket, endpoint, keys)
        self._start_reading()

    def send(self, parts: Sequence[Buffer]) -> bool:
        return self._send(parts)

    def close(self, linger_ms: int = 0) -> None:
        if self._monitor is not None:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        super().close(linger_ms)

    def _watch_breaks(self, on_break: Callable[[], None]) -> None:
        monitor = self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

        def read_events() -> None:
            while not monitor.closed and _get(monitor, _EVENTS) & _POLLIN:
                monitor.recv_multipart(zmq.NOBLOCK)
                on_break()

        asyncio.get_running_loop().add_reader(monitor.fileno(), read_events)
        read_events()  # the descriptor signals new events only after the socket was read until it was empty

    def _receive(self, parts: list[zmq.Frame]) -> None:
        self._handler([part.buffer for part in parts])


def bind(socket: "zmq.Socket[bytes]", endpoint: Endpoint, keys: CurveKeys | None = None) -> str:
    """Bind the socket and return the endpoint that peers connect to. Unix sockets are not encrypted."""
    is_encrypted = keys is not None and endpoint.bind.startswith(TCP_PREFIX)
    if keys is not None and is_encrypted:
        keys.encrypt_server(socket)
    if endpoint.bind.startswith("ipc://"):
        Path(endpoint.bind.removeprefix("ipc://")).unlink(missing_ok=True)
    prepare_tcp(socket, endpoint.bind)
    try:
        socket.bind(endpoint.to_bind)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {endpoint.bind}: {error.strerror}; choose another --bind") from error
    reached = endpoint.make_peer_address(bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
    return add_key(reached, keys.text) if keys is not None and is_encrypted else reached


def connect(socket: "zmq.Socket[bytes]", endpoint: str, keys: CurveKeys | None = None) -> None:
    """Connect to a published endpoint. If the endpoint has a public key, encrypt with `keys` or a new key pair."""
    address, key = split_key(endpoint)
    if key:
        (keys or CurveKeys()).encrypt_client(socket, key)
    prepare_tcp(socket, address)
    socket.connect(address)


def prepare_tcp(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Turn on ZeroMQ's pings, because the kernel takes many minutes to detect a dead connection between hosts."""
    if endpoint.startswith(TCP_PREFIX):
        socket.set(zmq.HEARTBEAT_IVL, PING_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
        socket.set(zmq.HEARTBEAT_TTL, PING_TIMEOUT_MS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.set(zmq.IPV6, int("[" in endpoint))


def read_host_identity() -> str:
    """Return an identifier of this process's namespace of process ids, within which processes see each other's ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
