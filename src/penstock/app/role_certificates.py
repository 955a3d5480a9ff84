"""A role's certificates, which are reloaded when their files change, and its guard."""

from contextlib import AsyncExitStack

from penstock.core.config import Config
from penstock.endpoints.guard import Guard, TokenReader
from penstock.features.keys.certificate_principals import CertificatePrincipals
from penstock.telemetry.background import BackgroundTasks
from penstock.wire.credentials.certificates import CHECK_S, Certificates
from penstock.wire.credentials.tls_files import TlsFiles


def open_certificates(config: Config, stack: AsyncExitStack) -> Certificates:
    """Open the configured certificates and reload them until the stack closes; raise ConfigError for bad files."""
    certificates = Certificates(TlsFiles.from_settings(config.tls), config.tls.client_auth)
    if not certificates.files.is_empty:
        tasks = BackgroundTasks("certificates")
        tasks.supervise("certificates", certificates.watch, every=CHECK_S)
        stack.push_async_callback(tasks.close)
    return certificates


def make_guard(config: Config, host: str, tokens: TokenReader | None = None) -> Guard:
    owners = CertificatePrincipals(config.tls.principals)
    return Guard(config.find_key_requirement(host), tokens, owners.find_principal if config.tls.principals else None)
