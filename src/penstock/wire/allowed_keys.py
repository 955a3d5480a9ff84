"""Authenticates callers from other hosts: ZeroMQ sockets accept the public keys that the manager has published.

ZeroMQ sends a request for each caller (protocol ZAP). An unknown key may belong to a new worker, so the request waits
until the manager publishes the key. If the manager does not publish the key, the request gets no answer, so that the
caller's handshake times out.
"""

import time
from collections.abc import Callable, Iterable

from penstock.core.tensors import Buffer
from penstock.wire.credentials.curve import HANDSHAKE_MS, ZAP_DOMAIN
from penstock.wire.sockets import RouterSocket
from penstock.wire.zmq_endpoints import Endpoint

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the ZAP protocol
VERSION, CURVE = b"1.0", b"CURVE"
REQUEST_PARTS = 8  # of a ZAP request: empty, version, request id, domain, address, identity, mechanism, key
MAX_WAITING_REQUESTS = 1024
MAX_REQUEST_BYTES = 1024


class AllowedKeys:
    """Answers ZeroMQ's authentication requests from a set of accepted public keys. A process has only one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: frozenset[bytes] = frozenset()
        self._waiting_requests: dict[
            tuple[bytes, bytes], tuple[bytes, float]
        ] = {}  # by ZAP peer and request id: the caller's key, and the time of the request
        self._socket = RouterSocket(self._on_request, MAX_REQUEST_BYTES)
        self._socket.bind(Endpoint(ZAP_ENDPOINT))

    def allow(self, keys: Iterable[str]) -> None:
        """Replace the accepted keys by `keys`, in hexadecimal. Existing connections stay open."""
        self._keys = frozenset(bytes.fromhex(key) for key in keys)
        for request in [each for each, (key, _) in self._waiting_requests.items() if key in self._keys]:
            del self._waiting_requests[request]
            self._accept(*request)

    def close(self) -> None:
        self._socket.unbind(ZAP_ENDPOINT)
        self._socket.close()

    def _on_request(self, identity: bytes, parts: list[Buffer]) -> None:
        if len(parts) != REQUEST_PARTS:
            return
        _, version, number, domain, _, _, mechanism, key = (bytes(part) for part in parts)
        if (version, domain, mechanism) != (VERSION, ZAP_DOMAIN, CURVE):
            return
        if key in self._keys:
            self._accept(identity, number)
        else:
            self._wait(identity, number, key)

    def _wait(self, identity: bytes, request_id: bytes, key: bytes) -> None:
        now = self._clock()
        for request, (_, since) in list(self._waiting_requests.items()):  # oldest first
            if now - since < HANDSHAKE_MS / 1000 and len(self._waiting_requests) < MAX_WAITING_REQUESTS:
                break
            del self._waiting_requests[request]  # the caller's handshake has timed out, or too many requests wait
        self._waiting_requests[identity, request_id] = key, now

    def _accept(self, identity: bytes, request_id: bytes) -> None:
        self._socket.send(identity, [b"", VERSION, request_id, b"200", b"", b"", b""])
