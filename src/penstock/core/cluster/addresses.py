"""Addresses as people write them: a host, and a port where they give one."""

from ipaddress import ip_address
from typing import NamedTuple

WILDCARDS = ("0.0.0.0", "::", "*")  # any address of the machine: one can listen there, and nobody can connect
LOCAL = "localhost"


class Address(NamedTuple):
    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def at(self, port: int) -> "Address":
        """With this port, where it has none."""
        return self if self.port is not None else Address(self.host, port)

    @property
    def is_wildcard(self) -> bool:
        return self.host in WILDCARDS


def parse_address(text: str) -> Address:
    """`host`, `host:port`, `[::1]:port`; a bare IPv6 address has no port. Raises ValueError."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, bracket, port = host[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError(f"'{text}' is no address: write [ADDRESS]:PORT")
        port = port[1:]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not host or "/" in host or " " in host:
        raise ValueError(f"'{text}' is no address: write HOST or HOST:PORT")
    if not port:
        return Address(host)
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"'{text}' is no address: its port is no number of 0 to 65535")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; of a name but the one that always means this machine, nobody knows."""
    try:
        return host == LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False
