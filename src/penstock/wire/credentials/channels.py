"""What a client goes by: the authorities that it trusts, and the certificate that it shows, if any."""

import ssl
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from penstock.core.errors import ConfigError
from penstock.wire.credentials.files import TlsFiles, read_pem, trusted

# Of TLS 1.2; those of 1.3 are all well. gRPC's own list is the same.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
TRIES = 10
PAUSE_S = 0.02
T = TypeVar("T")


def client_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For gRPC; raises ConfigError for files that cannot be used."""

    def read() -> tuple[bytes | None, bytes | None]:
        _context(files)  # which looks whether they match
        key, cert = (read_pem(path, "the client's certificate") if path else None for path in (files.key, files.cert))
        return key, cert

    return grpc.ssl_channel_credentials(trusted(files.ca) or None, *_settled(files, read))


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For HTTP and WebSockets."""
    return _settled(files, lambda: _context(files))


def _settled(files: TlsFiles, use: Callable[[], T]) -> T:
    """A certificate and its key are exchanged one after the other: in between they do not match."""
    for _ in range(TRIES):
        stamps = files.stamps()
        try:
            made = use()
        except ConfigError:
            if files.stamps() == stamps and not _is_fresh(stamps):
                raise
        else:
            if files.stamps() == stamps:
                return made
        time.sleep(PAUSE_S)
    return use()


def _is_fresh(stamps: tuple[tuple[int, ...], ...]) -> bool:
    """Whether one of the files is so new that the other may be yet to come."""
    return any(time.time_ns() - stamp[0] < 1e9 * TRIES * PAUSE_S for stamp in stamps if len(stamp) > 1)


def _context(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        if files.cert:
            context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # what ssl raises is one, too
        raise ConfigError(f"the certificates {files.cert or files.ca} cannot be used: {error.strerror}") from error
    return context
