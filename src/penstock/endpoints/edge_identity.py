"""The identity of a client behind the edge (the Envoy proxy), in headers that only the edge can set.

The edge removes every header of a client that begins with PREFIX. A gateway reads these headers only from its own unix
sockets, which only the edge can open.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from penstock.wire.credentials.certificate_names import read_pem_names

HEADER_PREFIX = "x-penstock-"
CLIENT_HEADER, CERTIFICATE_HEADER = f"{HEADER_PREFIX}client", f"{HEADER_PREFIX}certificate"
MESSAGE_BYTES_HEADER = f"{HEADER_PREFIX}message-bytes"  # the size of a large gRPC message
NAMES_BYTES = (CLIENT_HEADER.encode(), CERTIFICATE_HEADER.encode())
MAX_CACHED = 4096


class EdgeIdentity(NamedTuple):
    """The client that sent a request to the edge: its address and the names in its certificate."""

    client: tuple[str, int] = ("", 0)
    certificate: tuple[str, ...] = ()  # the names in the client's certificate, which the edge has verified

    @property
    def peer(self) -> str:
        """Return the client's address in gRPC's notation, such as `ipv4:10.0.0.7:50312`."""
        host, port = self.client
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def read_metadata_identity(metadata: Iterable[tuple[str, str | bytes]]) -> EdgeIdentity:
    return _parse_identity(
        {
            name: value
            for name, value in metadata
            if name in (CLIENT_HEADER, CERTIFICATE_HEADER) and isinstance(value, str)
        }
    )


def read_message_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Return the size of a call's message if the edge announces it, or 0."""
    return next((int(value) for name, value in metadata if name == MESSAGE_BYTES_HEADER and value.isdigit()), 0)


def read_header_identity(headers: Iterable[tuple[bytes, bytes]]) -> EdgeIdentity:
    """Return the identity in HTTP headers, whose names must be in lower case."""
    return _parse_identity({name.decode(): value.decode("latin-1") for name, value in headers if name in NAMES_BYTES})


def _parse_identity(headers: dict[str, str]) -> EdgeIdentity:
    certificate = headers.get(CERTIFICATE_HEADER, "")
    return EdgeIdentity(
        _parse_address(headers.get(CLIENT_HEADER, "")), read_pem_names(certificate) if certificate else ()
    )


@lru_cache(MAX_CACHED)
def _parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `1.2.3.4:5` or `[::1]:5`; an empty host if the text is neither."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]").removeprefix("::ffff:")
    return (host, int(port)) if port.isdigit() else ("", 0)
