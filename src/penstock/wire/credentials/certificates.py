"""This process's certificate: what its ports show and ask for, looked at anew each second.

A handshake that begins after files were exchanged goes by the new ones; what is open stays. Files that do not fit (one
of two is written already) are told of and looked at again, and until they do, what was there goes on.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from math import inf
from typing import Any, Literal

import grpc
import structlog

from penstock.core.errors import ConfigError
from penstock.wire.credentials.channels import CIPHERS
from penstock.wire.credentials.files import NO_FILES, TlsFiles, TlsMaterial, read_files

log = structlog.get_logger()
LOOK_S = 1.0
DAY_S = 86_400.0
SOON_S = 7 * DAY_S  # for so long before it expires, that is told each day
UNIX = "unix:"
HTTP = ("http/1.1",)
ClientAuth = Literal["none", "optional", "required"]
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Certificates:
    """Without files, everything is plain."""

    def __init__(self, files: TlsFiles = NO_FILES, client_auth: ClientAuth = "none") -> None:
        """Reads them now; raises ConfigError."""
        self.files = files
        self._client_auth: ClientAuth = client_auth
        self._stamps = self.files.stamps()
        self._material = TlsMaterial() if self.files.is_empty else read_files(self.files)
        self._told = ""  # why what is there now is not taken
        self.generation = 0  # how often it was another

    @property
    def is_serving(self) -> bool:
        """Whether ports speak TLS."""
        return bool(self._material.cert)

    @property
    def is_asking(self) -> bool:
        """Whether callers show certificates."""
        return self.is_serving and self._client_auth != "none"

    @property
    def expires_at(self) -> float:
        """Of the certificate, in seconds since 1970; 0: there is none."""
        return self._material.expires_at

    # --- what is new

    async def watch_forever(self) -> None:
        told = -inf  # when it was last said that it expires
        while not self.files.is_empty:
            if self.is_serving and self.expires_at - time.time() < SOON_S and time.monotonic() - told > DAY_S:
                told = time.monotonic()
                left_s = max(0.0, self.expires_at - time.time())
                log.warning("certificate_expires", cert=self.files.cert, days=round(left_s / DAY_S, 1))
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                log.exception("certificate_not_looked_at")  # what was read before goes on

    def look(self) -> bool:
        """Whether others are there and good."""
        stamps = self.files.stamps()
        if stamps == self._stamps and not self._told:
            return False
        try:
            found = read_files(self.files)
        except ConfigError as error:
            if error.message != self._told:
                log.warning("certificate_kept", error=error.message, advice="what was read before goes on")
            self._told = error.message
            return False
        self._stamps, self._told = stamps, ""
        if found == self._material:
            return False
        self._material = found
        self.generation += 1
        log.info("certificate_renewed", cert=self.files.cert, expires_at=found.expires_at)
        return True

    # --- ports

    def add_port(self, server: Any, address: str, client_auth: ClientAuth | None = None) -> int:
        """To a gRPC server, as its own do; sockets of this machine stay plain."""
        if not self.is_serving or address.startswith(UNIX):
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self.server_credentials(client_auth)))

    def server_credentials(self, client_auth: ClientAuth | None = None) -> grpc.ServerCredentials:
        """gRPC knows no certificates that may be shown and need not: `optional` asks for none."""
        given = self.generation

        def fetch() -> Any:
            """Before each handshake, in a thread of gRPC's; None: nothing is another."""
            nonlocal given
            if given == self.generation:
                return None
            given = self.generation
            return self._configuration(is_asking)

        is_asking = (client_auth or self._client_auth) == "required"
        return grpc.dynamic_ssl_server_credentials(self._configuration(is_asking), fetch, is_asking)

    def _configuration(self, is_asking: bool) -> Any:
        material = self._material
        roots = material.ca if is_asking else None
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=roots)

    def server_context(self, client_auth: ClientAuth | None = None) -> ssl.SSLContext:
        """For HTTP: an event loop's server makes each handshake of it."""
        return _Renewed(lambda: self.generation, lambda: self._context(client_auth or self._client_auth))

    def _context(self, client_auth: ClientAuth) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols(HTTP)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.verify_mode = _VERIFY[client_auth]
        if client_auth != "none":
            context.load_verify_locations(cadata=self._material.ca.decode())
        _load_pair(context, self._material)
        return context


class _Renewed(ssl.SSLContext):
    """Stands for the newest context: each connection begins with that one, its authorities included."""

    _generation: Callable[[], int]
    _make: Callable[[], ssl.SSLContext]
    _newest: tuple[int, ssl.SSLContext]

    def __new__(cls, generation: Callable[[], int], make: Callable[[], ssl.SSLContext]) -> "_Renewed":
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._generation, made._make = generation, make
        made._newest = generation(), make()
        return made

    def __init__(self, *given: Any) -> None:
        """All is done: the compiled part takes nothing else."""

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        generation = self._generation()
        if self._newest[0] != generation:
            self._newest = generation, self._make()
        return self._newest[1].wrap_bio(*args, **options)


def _load_pair(context: ssl.SSLContext, material: TlsMaterial) -> None:
    """From memory: the files may be others by now."""
    held = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(held, "wb", closefd=False) as opened:
            opened.write(material.cert + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
