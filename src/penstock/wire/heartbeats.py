"""Heartbeats on a separate thread and separate sockets, so that a busy event loop is not mistaken for a dead process.

A worker sends heartbeats to each of its gateways, a gateway answers every heartbeat, and each side measures for how
long the other side has been silent. If a process is stopped or has ended, its heartbeat thread is silent, too.
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Any

import zmq

from penstock.pb.v1 import job_pb2 as pb
from penstock.telemetry.background import SupervisedLoop
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.sockets import bind, connect
from penstock.wire.zmq_endpoints import Endpoint

MAX_LATE_BEATS = 2  # if the thread did not run for more beats than this, the rest of the time does not count as silence
CLOSE_TIMEOUT_S = 1.0  # how long `close` waits for the thread
MAX_BEAT_BYTES = 1024
HIGH_WATER_MARK = 16  # heartbeats that may wait for a peer; more would carry no further information


class PeerSilence:
    """Measures for how long each peer has been silent; counts only time in which this process listened."""

    def __init__(self, max_step_s: float, now: float) -> None:
        """`max_step_s` is the longest time between two calls of `advance` that counts as listening."""
        self._max_step_s = max_step_s
        self._advanced_at = now
        self._listened_s = 0.0
        self._received_at: dict[Any, float] = {}  # in seconds of `_listened_s`

    def advance(self, now: float) -> None:
        self._listened_s += min(now - self._advanced_at, self._max_step_s)
        self._advanced_at = now

    def track(self, peer: bytes | str) -> None:
        self._received_at.setdefault(peer, self._listened_s)

    def record_heartbeat(self, peer: bytes | str) -> None:
        """Reset the peer's silence to zero. Peers that are not tracked are ignored."""
        if peer in self._received_at:
            self._received_at[peer] = self._listened_s

    def forget(self, peer: bytes | str) -> None:
        self._received_at.pop(peer, None)

    def seconds(self, peer: bytes | str) -> float:
        """Return the seconds since the peer's last heartbeat, or infinity if the peer is not tracked."""
        received_at = self._received_at.get(peer)
        return inf if received_at is None else self._listened_s - received_at


class _HeartbeatThread:
    """Runs a thread that owns the heartbeat sockets. The event loop only sets and reads values of the thread."""

    def __init__(self, name: str, beat_s: float) -> None:
        self.silence = PeerSilence(MAX_LATE_BEATS * beat_s, time.monotonic())
        self._beat_s = beat_s
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._loop = SupervisedLoop(name, self._run_turn)
        self._loop.begin()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.end()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            self._loop.run_in_thread(lambda: self._is_closed)
        finally:
            for socket in self._list_sockets():
                socket.close(0)

    def _listen(self, until: float) -> Iterable[Any]:
        """Yield each readable socket until the time `until`, or until the thread is woken."""
        while (left_s := until - time.monotonic()) > 0:
            for ready, _ in self._poller.poll(1 + int(left_s * 1000)):
                if ready == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    return
                yield ready

    def _run_turn(self) -> None:
        raise NotImplementedError

    def _list_sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        raise NotImplementedError


class GatewayHeartbeats(_HeartbeatThread):
    """Answers workers' heartbeats. A worker has the same identity here as on the gateway's socket for jobs."""

    def __init__(self, endpoint: Endpoint, beat_s: float, keys: CurveKeys | None = None) -> None:
        super().__init__("gateway-beats", beat_s)
        self._socket = _create_socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects keeps its identity
        self.endpoint = bind(self._socket, endpoint, keys)
        self._poller.register(self._socket, zmq.POLLIN)
        self._thread.start()

    def _run_turn(self) -> None:
        for _ in self._listen(time.monotonic() + self._beat_s):
            identity, *_ = self._socket.recv_multipart()
            self.silence.record_heartbeat(identity)
            with suppress(zmq.Again, zmq.ZMQError):  # the worker left, or its queue is full
                self._socket.send_multipart([identity, _encode_beat()], zmq.NOBLOCK)
        self.silence.advance(time.monotonic())

    def _list_sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        return [self._socket]


class WorkerHeartbeats(_HeartbeatThread):
    """Sends heartbeats to gateways. A gateway is identified by the endpoint of its heartbeat socket."""

    def __init__(self, identity: bytes, beat_s: float, keys: CurveKeys | None = None) -> None:
        super().__init__("worker-beats", beat_s)
        self._keys = keys
        self._identity = identity
        self._wanted_endpoints: frozenset[str] = frozenset()
        self._open_sockets: dict[str, zmq.Socket[bytes]] = {}
        self._thread.start()

    def add_gateway(self, endpoint: str) -> None:
        if endpoint not in self._wanted_endpoints:
            self._wanted_endpoints |= {endpoint}
            self.silence.track(endpoint)
            self._wake()

    def remove_gateway(self, endpoint: str) -> None:
        self._wanted_endpoints -= {endpoint}
        self.silence.forget(endpoint)

    def _run_turn(self) -> None:
        self._connect(self._wanted_endpoints)
        for socket in self._open_sockets.values():
            with suppress(zmq.Again):  # the gateway has not read earlier heartbeats
                socket.send(_encode_beat(), zmq.NOBLOCK)
        endpoints = {socket: endpoint for endpoint, socket in self._open_sockets.items()}
        for socket in self._listen(time.monotonic() + self._beat_s):
            socket.recv_multipart()
            self.silence.record_heartbeat(endpoints[socket])
        self.silence.advance(time.monotonic())

    def _connect(self, endpoints: frozenset[str]) -> None:
        for endpoint in [known for known in self._open_sockets if known not in endpoints]:
            socket = self._open_sockets.pop(endpoint)
            self._poller.unregister(socket)
            socket.close(0)
        for endpoint in endpoints - self._open_sockets.keys():
            socket = self._open_sockets[endpoint] = _create_socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, self._identity)
            connect(socket, endpoint, self._keys)
            self._poller.register(socket, zmq.POLLIN)

    def _list_sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        return self._open_sockets.values()


def _create_socket(socket_type: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(socket_type)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.set(zmq.MAXMSGSIZE, MAX_BEAT_BYTES)
    return socket


def _encode_beat() -> bytes:
    return pb.Header(beat=pb.Beat(sent_ns=time.time_ns())).SerializeToString()
