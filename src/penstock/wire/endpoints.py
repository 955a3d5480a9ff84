"""ZeroMQ endpoints: where a socket binds, and what others are told to connect to."""

from typing import NamedTuple

from penstock.core.cluster.addresses import Address

TCP = "tcp://"
_KEY = "#"


def keyed(endpoint: str, key: str) -> str:
    """What others are told, where whoever listens has a key."""
    return f"{endpoint}{_KEY}{key}"


def split_key(endpoint: str) -> tuple[str, str]:
    """Where to connect, and the public key of whoever listens there; empty: it is plain."""
    where, _, key = endpoint.partition(_KEY)
    return where, key


class Endpoint(NamedTuple):
    """`host` and `port` are what others reach it by, where that is not what was bound: 0 is the port that was."""

    bind: str  # as ZeroMQ takes it; port 0 takes a free one
    host: str = ""
    port: int = 0

    @property
    def to_bind(self) -> str:
        return f"{self.bind[:-2]}:*" if self._has_open_port else self.bind

    def beside(self) -> "Endpoint":
        """A second one: a socket file beside this one's, or the next port."""
        if not self.bind.startswith(TCP):
            return Endpoint(f"{self.bind}.beats")
        if self._has_open_port:
            return self._replace(port=0)
        host, _, port = self.bind.rpartition(":")
        return Endpoint(f"{host}:{int(port) + 1}", self.host, self.port and self.port + 1)

    def reached(self, bound: str) -> str:
        """What others connect to, once the socket is bound."""
        if not self.bind.startswith(TCP) or not self.host:
            return bound
        return f"{TCP}{Address(self.host, self.port or int(bound.rpartition(':')[2]))}"

    @property
    def _has_open_port(self) -> bool:
        return self.bind.startswith(TCP) and self.bind.rpartition(":")[2] in ("0", "*")
