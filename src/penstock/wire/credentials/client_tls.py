"""TLS for clients: the authorities that a client trusts, and the client's certificate, if configured."""

import ssl
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from penstock.core.errors import ConfigError
from penstock.wire.credentials.tls_files import TlsFiles, read_authorities, read_pem

# The ciphers of TLS 1.2, as gRPC selects them. All ciphers of TLS 1.3 are allowed.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
MAX_TRIES = 10
PAUSE_S = 0.02
T = TypeVar("T")


def create_client_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Return credentials for gRPC. Raises ConfigError for invalid files."""

    def read() -> tuple[bytes | None, bytes | None]:
        _create_context(files)  # checks that certificate and key match
        key, cert = (read_pem(path, "the client's certificate") if path else None for path in (files.key, files.cert))
        return key, cert

    return grpc.ssl_channel_credentials(read_authorities(files.ca) or None, *_retry_while_changing(files, read))


def create_client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return an SSL context for HTTP and WebSocket clients."""
    return _retry_while_changing(files, lambda: _create_context(files))


def _retry_while_changing(files: TlsFiles, read: Callable[[], T]) -> T:
    """Call `read` again while the files change, because a certificate and its key are not replaced at the same time."""
    for _ in range(MAX_TRIES):
        stamps = files.read_stamps()
        try:
            made = read()
        except ConfigError:
            if files.read_stamps() == stamps and not _is_recently_written(stamps):
                raise
        else:
            if files.read_stamps() == stamps:
                return made
        time.sleep(PAUSE_S)
    return read()


def _is_recently_written(stamps: tuple[tuple[int, ...], ...]) -> bool:
    """Return whether one file is so new that the other files may not have been written yet."""
    return any(time.time_ns() - stamp[0] < 1e9 * MAX_TRIES * PAUSE_S for stamp in stamps if len(stamp) > 1)


def _create_context(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        if files.cert:
            context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # the base class of ssl.SSLError
        raise ConfigError(f"the certificates {files.cert or files.ca} cannot be used: {error.strerror}") from error
    return context
