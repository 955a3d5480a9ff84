"""CURVE encryption of ZeroMQ sockets between hosts, with one key pair per process.

A process creates its key pair when it starts and reports the public key to the manager. The secret key never leaves the
process, except that a gateway of a cluster keeps its key pair in its data directory.
"""

from pathlib import Path
from typing import Any

import structlog
import zmq
from zmq.utils import z85

from penstock.wire.credentials.private_file import replace_private

log = structlog.get_logger()
KEY_BYTES = 32

ZAP_DOMAIN = (
    b"penstock"  # the ZAP domain; because it is set, ZeroMQ refuses all callers that AllowedKeys does not accept
)
HANDSHAKE_MS = 3000  # time for a caller to be accepted


class CurveKeys:
    """A CURVE key pair."""

    __slots__ = ("_secret", "public")

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self.public = z85.decode(public)
        self._secret = z85.decode(secret)

    @classmethod
    def load_or_create(cls, file: Path) -> "CurveKeys":
        """Return the key pair in a private file; create the file if it does not exist.

        Peers accept a process that restarts with the same keys even if no manager can send the peers new keys. If the
        file cannot be used, the key pair is used only until the process ends.
        """
        found = cls()
        try:
            stored = file.read_bytes() if file.exists() else b""
            if len(stored) == 2 * KEY_BYTES:
                found.public, found._secret = stored[:KEY_BYTES], stored[KEY_BYTES:]
            else:
                replace_private(file, found.public + found._secret)
        except OSError as error:
            log.warning("curve_keys_not_kept", file=str(file), error=error.strerror)
        return found

    @property
    def text(self) -> str:
        """The public key of the pair in hexadecimal."""
        return self.public.hex()

    def encrypt_server(self, socket: Any) -> None:
        """Encrypt a socket before it is bound. Only callers that wire/allowed_keys.py accepts can connect."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)

    def encrypt_client(self, socket: Any, key: str) -> None:
        """Encrypt a socket before it is connected to the server with this public key."""

        socket.set(zmq.CURVE_SERVERKEY, bytes.fromhex(key))
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
