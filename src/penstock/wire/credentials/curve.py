"""CURVE, which ZeroMQ speaks between hosts: the key pair of a process, and what its sockets show and ask for.

A process makes its pair as it starts and tells the public half to the manager; nothing secret ever leaves it.
"""

from typing import Any

import zmq
from zmq.utils import z85

DOMAIN = b"penstock"  # whoever lets callers in is asked for it: where nobody does, nobody is
HANDSHAKE_MS = 3000  # until a caller is let in


class CurveKeys:
    __slots__ = ("_secret", "public")

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self.public = z85.decode(public)
        self._secret = z85.decode(secret)

    @property
    def text(self) -> str:
        """Of the public key."""
        return self.public.hex()

    def serve(self, socket: Any) -> None:
        """Before it binds: only those come in whom wire/allowed_keys.py lets in."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)

    def call(self, socket: Any, key: str) -> None:
        """Before it connects to whoever has that key."""
        socket.set(zmq.CURVE_SERVERKEY, bytes.fromhex(key))
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
