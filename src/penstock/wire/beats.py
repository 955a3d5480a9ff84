"""Heartbeats in a thread and on a socket of their own: a busy event loop is not a dead process.

A worker beats to each gateway that it meets, a gateway answers each beat, and both know how long the other has been
silent. Of a process that is stopped or gone all threads are silent.
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Any

import structlog
import zmq

from penstock.pb.v1 import job_pb2 as pb
from penstock.wire.credentials.curve import CurveKeys
from penstock.wire.endpoints import Endpoint
from penstock.wire.sockets import bind, connect

log = structlog.get_logger()
LATE_BEATS = 2  # a turn of the thread that takes longer was held up itself
END_S = 1.0  # what the thread gets to leave
MAX_BEAT_BYTES = 1024
HIGH_WATER_MARK = 16  # beats that a peer has not taken; more would tell it nothing


class Silences:
    """How long each peer has said nothing while this process listened; its own absences are nobody's silence."""

    def __init__(self, most_s: float, now: float) -> None:
        """Between two turns no more than `most_s` pass."""
        self._most_s = most_s
        self._turned = now
        self._listened_s = 0.0
        self._heard: dict[Any, float] = {}

    def turn(self, now: float) -> None:
        self._listened_s += min(now - self._turned, self._most_s)
        self._turned = now

    def follow(self, peer: bytes | str) -> None:
        self._heard.setdefault(peer, self._listened_s)

    def heard(self, peer: bytes | str) -> None:
        """Strangers are not kept."""
        if peer in self._heard:
            self._heard[peer] = self._listened_s

    def forget(self, peer: bytes | str) -> None:
        self._heard.pop(peer, None)

    def of(self, peer: bytes | str) -> float:
        """inf: it is not followed."""
        heard = self._heard.get(peer)
        return inf if heard is None else self._listened_s - heard


class _Heart:
    """The thread owns the sockets. All else is for the event loop, and only sets or reads what the thread looks at."""

    def __init__(self, name: str, beat_s: float) -> None:
        self.silences = Silences(LATE_BEATS * beat_s, time.monotonic())
        self._beat_s = beat_s
        self._is_closed = False
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(END_S)
        if not self._thread.is_alive():
            os.close(self._woken)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception:
            log.exception("heart_failed")  # the loop's own beats are left
        finally:
            for socket in self._sockets():
                socket.close(0)

    def _listen(self, until: float) -> Iterable[Any]:
        """Yields the sockets that have something to read, until then or until it is woken."""
        while (left_s := until - time.monotonic()) > 0:
            for ready, _ in self._poller.poll(1 + int(left_s * 1000)):
                if ready == self._woken:
                    os.eventfd_read(self._woken)
                    return
                yield ready

    def _turn(self) -> None:
        raise NotImplementedError

    def _sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        raise NotImplementedError


class GatewayHeart(_Heart):
    """Answers workers' beats; they are known by the identity that they have on the gateway's other socket."""

    def __init__(self, endpoint: Endpoint, beat_s: float, keys: CurveKeys | None = None) -> None:
        super().__init__("gateway-beats", beat_s)
        self._socket = _open(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a worker that connects again is the same
        self.endpoint = bind(self._socket, endpoint, keys)
        self._poller.register(self._socket, zmq.POLLIN)
        self._thread.start()

    def _turn(self) -> None:
        for _ in self._listen(time.monotonic() + self._beat_s):
            identity, *_ = self._socket.recv_multipart()
            self.silences.heard(identity)
            with suppress(zmq.Again, zmq.ZMQError):  # it left, or takes no more
                self._socket.send_multipart([identity, _beat()], zmq.NOBLOCK)
        self.silences.turn(time.monotonic())

    def _sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        return [self._socket]


class WorkerHeart(_Heart):
    """Beats to the gateways that it is told of; they are known by their hearts' endpoints."""

    def __init__(self, identity: bytes, beat_s: float, keys: CurveKeys | None = None) -> None:
        super().__init__("worker-beats", beat_s)
        self._keys = keys
        self._identity = identity
        self._wanted: frozenset[str] = frozenset()
        self._open: dict[str, zmq.Socket[bytes]] = {}
        self._thread.start()

    def meet(self, endpoint: str) -> None:
        if endpoint not in self._wanted:
            self._wanted |= {endpoint}
            self.silences.follow(endpoint)
            self._wake()

    def leave(self, endpoint: str) -> None:
        self._wanted -= {endpoint}
        self.silences.forget(endpoint)

    def _turn(self) -> None:
        self._connect(self._wanted)
        for socket in self._open.values():
            with suppress(zmq.Again):  # it has not taken those before
                socket.send(_beat(), zmq.NOBLOCK)
        endpoints = {socket: endpoint for endpoint, socket in self._open.items()}
        for socket in self._listen(time.monotonic() + self._beat_s):
            socket.recv_multipart()
            self.silences.heard(endpoints[socket])
        self.silences.turn(time.monotonic())

    def _connect(self, wanted: frozenset[str]) -> None:
        for endpoint in [known for known in self._open if known not in wanted]:
            socket = self._open.pop(endpoint)
            self._poller.unregister(socket)
            socket.close(0)
        for endpoint in wanted - self._open.keys():
            socket = self._open[endpoint] = _open(zmq.DEALER)
            socket.set(zmq.IDENTITY, self._identity)
            connect(socket, endpoint, self._keys)
            self._poller.register(socket, zmq.POLLIN)

    def _sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        return self._open.values()


def _open(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.set(zmq.MAXMSGSIZE, MAX_BEAT_BYTES)
    return socket


def _beat() -> bytes:
    return pb.Frame(beat=pb.Beat(sent_ns=time.time_ns())).SerializeToString()
