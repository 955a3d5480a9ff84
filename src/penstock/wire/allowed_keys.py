"""Whom this process's ZeroMQ sockets let in between hosts: callers whose public keys the manager has told.

ZeroMQ asks before it lets a caller in (ZAP). One whose key is not known yet may be a worker of whom the manager tells
in a moment: it is not answered, and comes in once it is known. A stranger is never answered; its connection ends.
"""

import time
from collections.abc import Callable, Iterable

from penstock.core.tensors import Buffer
from penstock.wire.credentials.curve import DOMAIN, HANDSHAKE_MS
from penstock.wire.endpoints import Endpoint
from penstock.wire.sockets import RouterSocket

ASKING = "inproc://zeromq.zap.01"  # where ZeroMQ asks
VERSION, CURVE = b"1.0", b"CURVE"
FRAMES = 8  # of a question: nothing, version, its number, domain, address, identity, mechanism, key
MAX_WAITING = 1024
MAX_QUESTION_BYTES = 1024


class AllowedKeys:
    """Used from one event loop; one a process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: frozenset[bytes] = frozenset()
        self._waiting: dict[
            tuple[bytes, bytes], tuple[bytes, float]
        ] = {}  # by who asks, and its number: the key, and when
        self._socket = RouterSocket(self._on_question, MAX_QUESTION_BYTES)
        self._socket.bind(Endpoint(ASKING))

    def allow(self, keys: Iterable[str]) -> None:
        """All that there are, as text; whoever is connected stays so."""
        self._keys = frozenset(bytes.fromhex(key) for key in keys)
        for question in [each for each, (key, _) in self._waiting.items() if key in self._keys]:
            del self._waiting[question]
            self._let_in(*question)

    def close(self) -> None:
        self._socket.unbind(ASKING)
        self._socket.close()

    def _on_question(self, identity: bytes, frames: list[Buffer]) -> None:
        if len(frames) != FRAMES:
            return
        _, version, number, domain, _, _, mechanism, key = (bytes(frame) for frame in frames)
        if (version, domain, mechanism) != (VERSION, DOMAIN, CURVE):
            return
        if key in self._keys:
            self._let_in(identity, number)
        else:
            self._wait(identity, number, key)

    def _wait(self, identity: bytes, number: bytes, key: bytes) -> None:
        now = self._clock()
        for question, (_, since) in list(self._waiting.items()):  # the oldest first
            if now - since < HANDSHAKE_MS / 1000 and len(self._waiting) < MAX_WAITING:
                break
            del self._waiting[question]  # its connection has ended, or it is one of too many
        self._waiting[identity, number] = key, now

    def _let_in(self, identity: bytes, number: bytes) -> None:
        self._socket.send(identity, [b"", VERSION, number, b"200", b"", b"", b""])
