"""What a client goes by: the authorities that it trusts, and the certificate that it shows, if any."""

import ssl

import grpc

from penstock.core.errors import ConfigError
from penstock.wire.credentials.files import TlsFiles, read_pem, trusted

# Of TLS 1.2; those of 1.3 are all well. gRPC's own list is the same.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def client_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For gRPC; raises ConfigError for a file that cannot be read."""
    cert, key = (read_pem(path, "the client's certificate") if path else None for path in (files.cert, files.key))
    return grpc.ssl_channel_credentials(trusted(files.ca) or None, key, cert)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For HTTP and WebSockets."""
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        if files.cert:
            context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # what ssl raises is one, too
        raise ConfigError(f"the certificates {files.ca or files.cert} cannot be used: {error.strerror}") from error
    return context
