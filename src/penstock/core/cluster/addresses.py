"""Addresses as people write them: a host with an optional port."""

from ipaddress import ip_address
from typing import NamedTuple

WILDCARDS = ("0.0.0.0", "::", "*")  # all addresses of the machine: for listening only, not for connecting
LOCALHOST = "localhost"


class Address(NamedTuple):
    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def with_default_port(self, port: int) -> "Address":
        """Return this address, or a copy with `port` if the address has no port."""
        return self if self.port is not None else Address(self.host, port)

    @property
    def is_wildcard(self) -> bool:
        return self.host in WILDCARDS


def parse_address(text: str) -> Address:
    """Parse `host`, `host:port` or `[::1]:port` (a bare IPv6 address has no port); raise ValueError."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, bracket, port = host[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError(f"'{text}' is not an address: write [ADDRESS]:PORT")
        port = port[1:]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not host or "/" in host or " " in host:
        raise ValueError(f"'{text}' is not an address: write HOST or HOST:PORT")
    if not port:
        return Address(host)
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"'{text}' is not an address: its port must be a number from 0 to 65535")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host; False for every host name except localhost."""
    try:
        return host == LOCALHOST or ip_address(host).is_loopback
    except ValueError:
        return False
