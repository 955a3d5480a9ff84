"""The identity of a client behind the edge, in headers that the edge sets and no client can set.

The edge removes every header of a client that begins with PREFIX. A gateway reads these headers only from its own unix
sockets, which only the edge can open.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from penstock.wire.credentials.certificate_names import names_of_pem

PREFIX = "x-penstock-"
CLIENT, CERTIFICATE = f"{PREFIX}client", f"{PREFIX}certificate"
NAMES_BYTES = (CLIENT.encode(), CERTIFICATE.encode())
CACHED = 4096


class EdgeIdentity(NamedTuple):
    """The sender of a request to the edge."""

    client: tuple[str, int] = ("", 0)
    certificate: tuple[str, ...] = ()  # the names in the client's certificate, which the edge has verified

    @property
    def peer(self) -> str:
        """Return the client's address in gRPC's notation, such as `ipv4:10.0.0.7:50312`."""
        host, port = self.client
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def identity_of_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> EdgeIdentity:
    return _parse_identity(
        {name: value for name, value in metadata if name in (CLIENT, CERTIFICATE) and isinstance(value, str)}
    )


def identity_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> EdgeIdentity:
    """Return the identity in HTTP headers, whose names must be in lower case."""
    return _parse_identity({name.decode(): value.decode("latin-1") for name, value in headers if name in NAMES_BYTES})


def _parse_identity(found: dict[str, str]) -> EdgeIdentity:
    certificate = found.get(CERTIFICATE, "")
    return EdgeIdentity(_parse_address(found.get(CLIENT, "")), names_of_pem(certificate) if certificate else ())


@lru_cache(CACHED)
def _parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `1.2.3.4:5` or `[::1]:5`; an empty host if the text is neither."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]").removeprefix("::ffff:")
    return (host, int(port)) if port.isdigit() else ("", 0)
