"""Who a role is and whom it admits: its certificate, watched for as long as it runs, and its guard."""

import asyncio
from contextlib import AsyncExitStack

from penstock.access.certificates import CertificateHolders
from penstock.access.guard import Guard, TokenReader
from penstock.core.config import Config
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.files import TlsFiles


def open_certificates(config: Config, stack: AsyncExitStack) -> Certificates:
    """Raises ConfigError."""
    certificates = Certificates(TlsFiles.of(config.tls), config.tls.client_auth)
    watching = asyncio.create_task(certificates.watch_forever(), name="watch-certificates")
    stack.callback(watching.cancel)
    return certificates


def make_guard(config: Config, host: str, tokens: TokenReader | None = None) -> Guard:
    """Of a door at that host."""
    owners = CertificateHolders(config.tls.principals)
    return Guard(config.asks_at(host), tokens, owners.principal if config.tls.principals else None)
