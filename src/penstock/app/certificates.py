"""The certificate of a role, watched for as long as it runs."""

import asyncio
from contextlib import AsyncExitStack

from penstock.core.config import Config
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.files import TlsFiles


def open_certificates(config: Config, stack: AsyncExitStack) -> Certificates:
    """Raises ConfigError."""
    certificates = Certificates(TlsFiles.of(config.tls), config.tls.client_auth)
    watching = asyncio.create_task(certificates.watch_forever(), name="watch-certificates")
    stack.callback(watching.cancel)
    return certificates
