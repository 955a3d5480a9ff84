"""The guard for HTTP: it checks the `Host` header and the origin of web pages, then the caller's credentials.

A browser lets any page send requests to its visitor's machine and network. If the page's owner points its host name at
this server's address (DNS rebinding), the browser even takes both for the same origin. Programs send no `Origin`
header; a page can neither hide its origin nor choose `Host`. gRPC needs only the credentials check, because pages
cannot use gRPC.
"""

import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from penstock.core.config import Config
from penstock.core.errors import Forbidden, PenstockError, UnknownHost
from penstock.core.principals import ANYBODY, Needs, Principal
from penstock.endpoints.credentials import Credentials
from penstock.endpoints.guard import Guard

Headers = Iterable[tuple[bytes, bytes]]
READ_METHODS = ("GET", "HEAD", "OPTIONS")
ANY_ORIGIN = "*"
CERTIFICATE = "certificate"  # the key of the names in the client's certificate, in the state of a connection
LOCALHOST = "localhost"
HOST_PATTERN = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+?)\.?)(?::[0-9]{0,5})?")  # with a port, or without
MAX_CACHED_HOSTS = 64  # spellings of known hosts that are cached
OWN_SITE_VALUES = (
    b"same-origin",
    b"none",
)  # `Sec-Fetch-Site` of requests by this server's pages, and of addresses that the user typed


class HttpGuard:
    def __init__(self, config: Config, guard: Guard, names: Sequence[str] = ()) -> None:
        """Create a guard. `names`: the host names of this machine."""
        self.guard = guard
        self._is_local = config.is_local
        self._names = {LOCALHOST, config.host.lower(), *(name.lower().rstrip(".") for name in config.allowed_hosts)}
        if not self._is_local:
            self._names.update(name.lower() for name in names)
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))
        self.origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._known: set[bytes] = set()

    def find_refusal(self, headers: Headers, method: str) -> PenstockError | None:
        """Return why the host or origin is refused, or None. `method` is empty for a WebSocket."""
        hosts, origins, sites = (
            [value for name, value in headers if name == wanted] for wanted in (b"host", b"origin", b"sec-fetch-site")
        )
        for host in hosts:
            if not self.is_own_host(host):
                return UnknownHost(
                    f"this server does not answer to the host '{_decode_text(host)}': call it by its address, or start "
                    "it with --allowed-host NAME (setting allowed_hosts)"
                )
        if method in READ_METHODS or ANY_ORIGIN in self.origins:
            return None
        if origins and all(_decode_text(origin).lower() in self.origins for origin in origins):
            return None
        foreign = [origin for origin in origins if not _is_own_origin(origin, hosts)]
        if foreign or any(site.lower() not in OWN_SITE_VALUES for site in sites):
            page = f"pages of '{_decode_text(foreign[0])}'" if foreign else "pages of other sites"
            return Forbidden(
                f"{page} may not call this server: start it with --allowed-origin ORIGIN (setting allowed_origins) if "
                "they should"
            )
        return None

    def admit(self, headers: Headers, needs: Needs, certificate: tuple[str, ...] = ()) -> Principal:
        """Return the caller, or raise Unauthenticated or Forbidden."""
        if self.guard.is_open:
            return ANYBODY
        return self.guard.admit(Credentials.from_headers(headers, certificate), needs, time.time())

    def admit_scope(self, scope: Mapping[str, Any], needs: Needs) -> Principal:
        """Like `admit`, for the scope of an ASGI request or WebSocket."""
        return self.admit(scope["headers"], needs, get_certificate(scope))

    def is_own_host(self, host: bytes) -> bool:
        """Return whether `host` is empty or a name of this server. Browsers always send a host; old clients may not."""
        if host in self._known:
            return True
        is_known = not host or ANY_ORIGIN in self._names or self._is_own_name(_decode_text(host).lower())
        if is_known and len(self._known) < MAX_CACHED_HOSTS:
            self._known.add(host)
        return is_known

    def _is_own_name(self, host: str) -> bool:
        parts = HOST_PATTERN.fullmatch(host)
        if parts is None:
            return False
        name = parts[1] or parts[2]
        if name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        # An address cannot be rebound by DNS. A server that is open to others may have any number of addresses.
        return address.is_loopback or not self._is_local


def get_certificate(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in the client's certificate; an empty tuple without a certificate."""
    found: tuple[str, ...] = scope.get("state", {}).get(CERTIFICATE, ())
    return found


def list_machine_names() -> tuple[str, ...]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _is_own_origin(origin: bytes, hosts: Sequence[bytes]) -> bool:
    """Return whether the origin is the server that `Host` names; `Host` must already be checked."""
    scheme, _, location = _decode_text(origin).lower().partition("://")
    return scheme in ("http", "https") and [location.encode("latin-1")] == [host.lower() for host in hosts]


def _decode_text(value: bytes) -> str:
    return value[:200].decode("latin-1")
