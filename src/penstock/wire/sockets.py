"""Sockets between gateways and workers, on an event loop: unix sockets within a machine, ZeroMQ's between hosts."""

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
from penstock.wire.endpoints import TCP, Endpoint, keyed, split_key
from penstock.wire.ipc.sockets import IPC, LocalDealer, LocalRouter

# The hot path calls the compiled socket: the wrapper around it costs three times as much as the call.
_send: Any = RawSocket.send
_receive: Any = RawSocket.recv
_get: Any = RawSocket.get
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)

# Frames from this size on are handed to ZeroMQ without copying; below it a copy is cheaper.
ZERO_COPY_BYTES = 64 * 1024
# Messages read in one go before other work gets its turn on the loop.
DRAIN_AT_ONCE = 64
# Credits bound what is in flight to a peer far below this.
HIGH_WATER_MARK = 100_000

# Of connections between hosts: how often they are pinged, and when one that does not answer is opened anew.
PING_MS = 1000
DEAD_MS = 4000
CONNECT_MS = 1000

RouterHandler = Callable[[bytes, list[Buffer]], None]
DealerHandler = Callable[[list[Buffer]], None]


class _Socket:
    def __init__(self, kind: int, max_message_bytes: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
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
        for _ in range(DRAIN_AT_ONCE):
            if socket.closed or not _get(socket, _EVENTS) & _POLLIN:
                return
            frame = _receive(socket, _NOBLOCK, False)
            frames = [frame]
            while frame.more:
                frame = _receive(socket, _NOBLOCK, False)
                frames.append(frame)
            try:
                self._receive(frames)
            except Exception:
                self._drain_soon()  # one message that a handler fails on must not hold up those behind it
                raise
        self._drain_soon()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def _send(self, frames: Sequence[Buffer]) -> bool:
        socket, more = self._socket, len(frames)
        try:
            for frame in frames:
                more -= 1
                _send(socket, frame, _NOBLOCK | _SNDMORE if more else _NOBLOCK, len(frame) < ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        # The descriptor is edge-triggered, and a send may have consumed its event.
        if not self._is_drain_due and _get(socket, _EVENTS) & _POLLIN:
            self._drain_soon()
        return True

    def close(self, linger_ms: int = 0) -> None:
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger_ms)


class RouterSocket:
    """The gateway's side: many workers, each known by its identity."""

    def __init__(self, handler: RouterHandler, max_message_bytes: int = -1) -> None:
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._socket: LocalRouter | _ZmqRouter | None = None
        # False: nobody of that identity is connected, or it takes no more.
        self.send: Callable[[bytes, Sequence[Buffer]], bool] = lambda identity, frames: False

    def bind(self, endpoint: Endpoint, keys: CurveKeys | None = None) -> str:
        """Returns what others connect to."""
        if endpoint.bind.startswith(IPC):
            self._socket = local = LocalRouter(self._handler, self._max_message_bytes)
            reached = local.bind(endpoint.bind)
        else:
            self._socket = remote = _ZmqRouter(self._handler, self._max_message_bytes)
            reached = remote.bind(endpoint, keys)
        self.send = self._socket.send
        return reached

    def unbind(self, endpoint: str) -> None:
        """At once; closing does it in its own time."""
        if self._socket is not None:
            self._socket.unbind(endpoint)

    def close(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms)


class DealerSocket:
    """The worker's side: one gateway."""

    def __init__(self, handler: DealerHandler, identity: bytes) -> None:
        self._handler = handler
        self._identity = identity
        self._socket: LocalDealer | _ZmqDealer | None = None
        self.send: Callable[[Sequence[Buffer]], bool] = lambda frames: False  # until it is told where to connect

    def connect(
        self, endpoint: str, on_break: Callable[[], None] = lambda: None, keys: CurveKeys | None = None
    ) -> None:
        """`on_break`: what was on its way between hosts, here or there, may be lost; it connects again by itself."""
        if endpoint.startswith(IPC):  # within a machine only the end of a process breaks a connection
            self._socket = local = LocalDealer(self._handler, self._identity)
            local.connect(endpoint)
        else:
            self._socket = remote = _ZmqDealer(self._handler, self._identity)
            remote.connect(endpoint, on_break, keys)
        self.send = self._socket.send

    def close(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms)


class _ZmqRouter(_Socket):
    def __init__(self, handler: RouterHandler, max_message_bytes: int) -> None:
        super().__init__(zmq.ROUTER, max_message_bytes)
        self._handler = handler
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a worker whose connection broke may be back before we see that

    def bind(self, endpoint: Endpoint, keys: CurveKeys | None) -> str:
        reached = bind(self._socket, endpoint, keys)
        self._start_reading()
        return reached

    def unbind(self, endpoint: str) -> None:
        self._socket.unbind(endpoint)

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        return self._send([identity, *frames])

    def _receive(self, frames: list[zmq.Frame]) -> None:
        self._handler(frames[0].bytes, [frame.buffer for frame in frames[1:]])


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

    def send(self, frames: Sequence[Buffer]) -> bool:
        return self._send(frames)

    def close(self, linger_ms: int = 0) -> None:
        if self._monitor is not None:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        super().close(linger_ms)

    def _watch_breaks(self, on_break: Callable[[], None]) -> None:
        monitor = self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

        def heard() -> None:
            while not monitor.closed and _get(monitor, _EVENTS) & _POLLIN:
                monitor.recv_multipart(zmq.NOBLOCK)
                on_break()

        asyncio.get_running_loop().add_reader(monitor.fileno(), heard)
        heard()  # only who has once looked in vain is woken

    def _receive(self, frames: list[zmq.Frame]) -> None:
        self._handler([frame.buffer for frame in frames])


def bind(socket: "zmq.Socket[bytes]", endpoint: Endpoint, keys: CurveKeys | None = None) -> str:
    """Returns what others connect to. Within a machine nothing is encrypted."""
    is_encrypted = keys is not None and endpoint.bind.startswith(TCP)
    if keys is not None and is_encrypted:
        keys.serve(socket)
    if endpoint.bind.startswith("ipc://"):
        Path(endpoint.bind.removeprefix("ipc://")).unlink(missing_ok=True)
    prepare_tcp(socket, endpoint.bind)
    try:
        socket.bind(endpoint.to_bind)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {endpoint.bind}: {error.strerror}; choose another --bind") from error
    reached = endpoint.reached(bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
    return keyed(reached, keys.text) if keys is not None and is_encrypted else reached


def connect(socket: "zmq.Socket[bytes]", endpoint: str, keys: CurveKeys | None = None) -> None:
    """To what others were told, which may have a key; then `keys` are its own, or new ones."""
    where, key = split_key(endpoint)
    if key:
        (keys or CurveKeys()).call(socket, key)
    prepare_tcp(socket, where)
    socket.connect(where)


def prepare_tcp(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Between hosts a connection may be dead without a word: the kernel alone would wait for it for many minutes."""
    if endpoint.startswith(TCP):
        socket.set(zmq.HEARTBEAT_IVL, PING_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, DEAD_MS)
        socket.set(zmq.HEARTBEAT_TTL, DEAD_MS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.set(zmq.IPV6, int("[" in endpoint))


def host_identity() -> str:
    """Equal for two processes that see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
