"""Who may call over HTTP: whoever names a host that this server answers to, no page of another site that acts, and whom
the guard admits.

A browser lets any page send requests to its visitor's machine and network, and a name that its owner binds to
another address (DNS rebinding) makes such a page one of this server's own. Programs send no `Origin`, and a page can
neither hide its own nor choose `Host`. gRPC needs the guard alone: no page can speak it without a proxy of its own.
"""

import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from penstock.access.guard import Guard
from penstock.access.showing import Shown
from penstock.core.config import Config
from penstock.core.errors import Forbidden, PenstockError, UnknownHost
from penstock.core.principals import ANYBODY, Needs, Principal

Headers = Iterable[tuple[bytes, bytes]]
READS = ("GET", "HEAD", "OPTIONS")
ANY = "*"
CERTIFICATE = "certificate"  # where a connection keeps the names in the one that it was shown
LOCAL = "localhost"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+?)\.?)(?::[0-9]{0,5})?")  # with a port, or without
REMEMBERED = 64  # spellings of hosts that are known
OWN_SITE = (b"same-origin", b"none")  # `Sec-Fetch-Site` of this server's pages, and of what the user typed


class Doorman:
    def __init__(self, config: Config, guard: Guard, names: Sequence[str] = ()) -> None:
        """`names`: what this machine is called."""
        self.guard = guard
        self._is_local = config.is_local
        self._names = {LOCAL, config.host.lower(), *(name.lower().rstrip(".") for name in config.allowed_hosts)}
        if not self._is_local:
            self._names.update(name.lower() for name in names)
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))
        self.origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._known: set[bytes] = set()

    def refusal(self, headers: Headers, method: str) -> PenstockError | None:
        """Why it may not come in; a WebSocket acts, whatever its method says."""
        hosts, origins, sites = (
            [value for name, value in headers if name == wanted] for wanted in (b"host", b"origin", b"sec-fetch-site")
        )
        for host in hosts:
            if not self.answers_to(host):
                return UnknownHost(
                    f"this server does not answer to the host '{_text(host)}': call it by its address, or start it "
                    "with --allowed-host NAME (setting allowed_hosts)"
                )
        if method in READS or ANY in self.origins:
            return None
        if origins and all(_text(origin).lower() in self.origins for origin in origins):
            return None
        foreign = [origin for origin in origins if not _is_own(origin, hosts)]
        if foreign or any(site.lower() not in OWN_SITE for site in sites):
            page = f"pages of '{_text(foreign[0])}'" if foreign else "pages of other sites"
            return Forbidden(
                f"{page} may not call this server: start it with --allowed-origin ORIGIN (setting allowed_origins) if "
                "they should"
            )
        return None

    def admit(self, headers: Headers, needs: Needs, certificate: tuple[str, ...] = ()) -> Principal:
        """Raises where the guard does."""
        if self.guard.is_open:
            return ANYBODY
        return self.guard.admit(Shown.of_headers(headers, certificate), needs, time.time())

    def admit_scope(self, scope: Mapping[str, Any], needs: Needs) -> Principal:
        """Of a request or a WebSocket, by its headers and the certificate of its connection."""
        return self.admit(scope["headers"], needs, scope.get("state", {}).get(CERTIFICATE, ()))

    def answers_to(self, host: bytes) -> bool:
        """Whether `Host` may say so; none is what very old clients say, and no browser."""
        if host in self._known:
            return True
        is_known = not host or ANY in self._names or self._is_own_name(_text(host).lower())
        if is_known and len(self._known) < REMEMBERED:
            self._known.add(host)
        return is_known

    def _is_own_name(self, host: str) -> bool:
        parts = HOST.fullmatch(host)
        if parts is None:
            return False
        name = parts[1] or parts[2]
        if name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        # An address cannot be bound anew. Behind one that is open to others there may be any number of further ones.
        return address.is_loopback or not self._is_local


def machine_names() -> tuple[str, ...]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _is_own(origin: bytes, hosts: Sequence[bytes]) -> bool:
    """The host is known by now, so what has it in its address came from here."""
    scheme, _, place = _text(origin).lower().partition("://")
    return scheme in ("http", "https") and [place.encode("latin-1")] == [host.lower() for host in hosts]


def _text(value: bytes) -> str:
    return value[:200].decode("latin-1")
