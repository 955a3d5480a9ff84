"""ZeroMQ endpoints: each has the address that a socket binds to, and the address that peers connect to."""

from typing import NamedTuple

from penstock.core.cluster.addresses import Address

TCP_PREFIX = "tcp://"
_KEY_SEPARATOR = "#"


def add_key(endpoint: str, key: str) -> str:
    """Return the published form of an endpoint whose socket has this public key."""
    return f"{endpoint}{_KEY_SEPARATOR}{key}"


def split_key(endpoint: str) -> tuple[str, str]:
    """Split a published endpoint into its address and its public key, which is empty for a plaintext socket."""
    address, _, key = endpoint.partition(_KEY_SEPARATOR)
    return address, key


class Endpoint(NamedTuple):
    """An address to bind to, and the host and port for peers if these differ. Port 0 means the port that was bound."""

    bind: str  # in ZeroMQ's notation; port 0 lets the system choose a free port
    host: str = ""
    port: int = 0

    @property
    def to_bind(self) -> str:
        return f"{self.bind[:-2]}:*" if self._has_open_port else self.bind

    def make_heartbeat_endpoint(self) -> "Endpoint":
        """Return the endpoint for the heartbeat socket: a file beside this socket's file, or the next port."""
        if not self.bind.startswith(TCP_PREFIX):
            return Endpoint(f"{self.bind}.beats")
        if self._has_open_port:
            return self._replace(port=0)
        host, _, port = self.bind.rpartition(":")
        return Endpoint(f"{host}:{int(port) + 1}", self.host, self.port and self.port + 1)

    def make_peer_address(self, bound_address: str) -> str:
        """Return the address that peers connect to, given the address that the socket was bound to."""
        if not self.bind.startswith(TCP_PREFIX) or not self.host:
            return bound_address
        return f"{TCP_PREFIX}{Address(self.host, self.port or int(bound_address.rpartition(':')[2]))}"

    @property
    def _has_open_port(self) -> bool:
        return self.bind.startswith(TCP_PREFIX) and self.bind.rpartition(":")[2] in ("0", "*")
