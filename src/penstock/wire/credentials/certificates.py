"""The TLS certificate of this process's ports. The certificate's files are checked for changes every second.

Handshakes that start after the files changed use the new certificate; open connections stay. If the new files are
invalid (as between the writes of certificate and key), a warning is logged and the previous certificate stays in use.
"""

import os
import ssl
import time
from collections.abc import Callable
from math import inf
from typing import Any, Literal

import grpc
import structlog

from penstock.core.errors import ConfigError
from penstock.wire.credentials.client_tls import CIPHERS
from penstock.wire.credentials.tls_files import NO_FILES, TlsFiles, TlsMaterial, read_files

log = structlog.get_logger()
CHECK_S = 1.0
DAY_S = 86_400.0
EXPIRY_WARNING_S = 7 * DAY_S  # a warning is logged every day if the certificate expires within this time
UNIX_PREFIX = "unix:"
ALPN_PROTOCOLS = ("http/1.1",)
ClientAuth = Literal["none", "optional", "required"]
_VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Certificates:
    """Reads a process's TLS files, and reads changed files again. Without files, ports are plaintext."""

    def __init__(self, files: TlsFiles = NO_FILES, client_auth: ClientAuth = "none") -> None:
        """Read the files. Raises ConfigError if a file is invalid."""
        self.files = files
        self._client_auth: ClientAuth = client_auth
        self._stamps = self.files.read_stamps()
        self._current_material = TlsMaterial() if self.files.is_empty else read_files(self.files)
        self._problem = ""  # why the current files are not used
        self._warned_at = -inf  # when the last warning about expiry was logged
        self.generation = 0  # grows with each change of the certificate

    @property
    def is_serving(self) -> bool:
        """Return whether ports use TLS."""
        return bool(self._current_material.cert)

    @property
    def material(self) -> TlsMaterial:
        """The certificate, its key and the trusted authorities, as last read from the files."""
        return self._current_material

    @property
    def requests_client_certificates(self) -> bool:
        """Return whether ports ask clients for certificates."""
        return self.is_serving and self._client_auth != "none"

    @property
    def expires_at(self) -> float:
        """The time when the certificate expires, in seconds since 1970; 0 without a certificate."""
        return self._current_material.expires_at

    # --- changes of the files

    def watch(self) -> None:
        """Read changed files again, and warn once a day if the certificate expires soon. Call this every second."""
        self.reload()
        if (
            self.is_serving
            and self.expires_at - time.time() < EXPIRY_WARNING_S
            and time.monotonic() - self._warned_at > DAY_S
        ):
            self._warned_at = time.monotonic()
            left_s = max(0.0, self.expires_at - time.time())
            log.warning("certificate_expires", cert=self.files.cert, days=round(left_s / DAY_S, 1))

    def reload(self) -> bool:
        """Read the files if they have changed; return whether a new valid certificate was read."""
        stamps = self.files.read_stamps()
        if stamps == self._stamps and not self._problem:
            return False
        try:
            found = read_files(self.files)
        except ConfigError as error:
            if error.message != self._problem:
                advice = "the previous certificate stays in use"
                log.warning("certificate_reload_failed", error=error.message, advice=advice)
            self._problem = error.message
            return False
        self._stamps, self._problem = stamps, ""
        if found == self._current_material:
            return False
        self._current_material = found
        self.generation += 1
        log.info("certificate_renewed", cert=self.files.cert, expires_at=found.expires_at)
        return True

    # --- ports

    def add_port(self, server: Any, address: str, client_auth: ClientAuth | None = None) -> int:
        """Add a port to a gRPC server, with TLS if there is a certificate. Unix sockets stay plaintext."""
        if not self.is_serving or address.startswith(UNIX_PREFIX):
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self.create_server_credentials(client_auth)))

    def create_server_credentials(self, client_auth: ClientAuth | None = None) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server. The server requests client certificates only if they are required."""
        current = self.generation

        def fetch() -> Any:
            """Return the configuration if the certificate changed, or None. gRPC calls this before each handshake."""
            nonlocal current
            if current == self.generation:
                return None
            current = self.generation
            return self._create_configuration(requires_certificate)

        requires_certificate = (client_auth or self._client_auth) == "required"
        return grpc.dynamic_ssl_server_credentials(
            self._create_configuration(requires_certificate), fetch, requires_certificate
        )

    def _create_configuration(self, requires_certificate: bool) -> Any:
        material = self._current_material
        roots = material.ca if requires_certificate else None
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=roots)

    def create_server_context(self, client_auth: ClientAuth | None = None) -> ssl.SSLContext:
        """Return a context that always uses the newest certificate, for an HTTP server on an event loop."""
        return _RenewedContext(lambda: self.generation, lambda: self._create_context(client_auth or self._client_auth))

    def _create_context(self, client_auth: ClientAuth) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols(ALPN_PROTOCOLS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.verify_mode = _VERIFY_MODES[client_auth]
        if client_auth != "none":
            context.load_verify_locations(cadata=self._current_material.ca.decode())
        _load_pair(context, self._current_material)
        return context


class _RenewedContext(ssl.SSLContext):
    """Uses, for each new connection, an SSLContext with the newest certificate and authorities."""

    _generation: Callable[[], int]
    _make: Callable[[], ssl.SSLContext]
    _newest: tuple[int, ssl.SSLContext]

    def __new__(cls, generation: Callable[[], int], make: Callable[[], ssl.SSLContext]) -> "_RenewedContext":
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._generation, made._make = generation, make
        made._newest = generation(), make()
        return made

    def __init__(self, *arguments: Any) -> None:
        """Do nothing: the base class would reject these arguments."""

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        generation = self._generation()
        if self._newest[0] != generation:
            self._newest = generation, self._make()
        return self._newest[1].wrap_bio(*args, **options)


def _load_pair(context: ssl.SSLContext, material: TlsMaterial) -> None:
    """Load the certificate and key from memory, because the files may have changed since they were last read."""
    held = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(held, "wb", closefd=False) as opened:
            opened.write(material.cert + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
