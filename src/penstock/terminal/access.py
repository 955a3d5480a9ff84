"""The API key and certificates that a command uses to call a server."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import ssl

    from penstock.client.client_options import ClientOptions
    from penstock.core.config import Config

KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="File containing the API key to send. [default: variable PENSTOCK_API_KEY]"),
]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", help="PEM file of the certificate authority to trust for TLS. [default: setting tls.ca]"),
]


@dataclass(frozen=True, slots=True)
class Access:
    """An API key and paths of PEM files; a field that is not used is empty."""

    key: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""

    @classmethod
    def of(cls, config: "Config", ca: str = "") -> "Access":
        """Return the key and certificates of the settings. `ca` applies if the settings name no authority."""
        tls = config.tls
        return cls(config.own_key(), tls.ca or ca, tls.cert, tls.key)

    @property
    def is_tls(self) -> bool:
        return bool(self.ca or self.cert)

    @property
    def options(self) -> "ClientOptions":
        """Return the options of a gRPC client, which ignores certificates if its address has a scheme without TLS."""
        return {"api_key": self.key, "ca": self.ca, "cert": self.cert, "cert_key": self.cert_key}

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def url(self, http: str, path: str = "") -> str:
        """Return the URL of a path. An address without a scheme gets https if certificates are set, otherwise http."""
        base = http if "://" in http else f"{'https' if self.is_tls else 'http'}://{http}"
        return base.rstrip("/") + path

    def context(self, url: str) -> "ssl.SSLContext | None":
        from penstock.wire.credentials.client_tls import create_client_context
        from penstock.wire.credentials.tls_files import TlsFiles

        return create_client_context(TlsFiles(self.cert, self.cert_key, self.ca)) if url.startswith("https:") else None


NO_ACCESS = Access()


def read_settings(config: Path | None, key_file: Path | None, ca: Path | None) -> "Config":
    """Load the settings. The command line takes precedence over the environment and the configuration file."""
    from penstock.core.config import load_config

    settings = load_config(config, api_key_file=key_file, tls={"ca": str(ca)} if ca else None)
    return settings.model_copy(update={"api_key": None}) if key_file else settings


def with_options(command: Callable[..., None], run: Callable[..., None]) -> Callable[..., None]:
    """Return `run` with the signature that typer reads.

    The signature has the required arguments of `run`, the parameters of `command` except the first, and the options of
    `run`. `run` calls `command` and provides the first parameter.
    """
    _, *own = signature(command).parameters.values()
    added = [each for each in signature(run).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    first = [each for each in added if each.default is Parameter.empty]
    shown = run.__dict__["__signature__"] = Signature([*first, *own, *(each for each in added if each not in first)])
    run.__annotations__ = {name: each.annotation for name, each in shown.parameters.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
