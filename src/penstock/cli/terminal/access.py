"""What a command shows to a server: a key, and the certificates that it goes by."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import ssl

    from penstock.client.options import ClientOptions
    from penstock.core.config import Config

KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="A file with the key to show. [default: PENSTOCK_API_KEY]")
]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", help="PEM of the authority whose certificates to trust, for TLS. [default: setting tls.ca]"),
]


@dataclass(frozen=True, slots=True)
class Access:
    """`key` is empty where none is shown; the others are paths of PEM files, empty where there are none."""

    key: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""

    @classmethod
    def of(cls, config: "Config") -> "Access":
        tls = config.tls
        return cls(config.shown_key(), tls.ca, tls.cert, tls.key)

    @property
    def is_tls(self) -> bool:
        return bool(self.ca or self.cert)

    @property
    def options(self) -> "ClientOptions":
        """Of a client of a gRPC address; certificates are for those that are not said to be plain."""
        return {"api_key": self.key, "ca": self.ca, "cert": self.cert, "cert_key": self.cert_key}

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def url(self, http: str, path: str = "") -> str:
        """An address without a scheme is TLS where there are certificates."""
        base = http if "://" in http else f"{'https' if self.is_tls else 'http'}://{http}"
        return base.rstrip("/") + path

    def context(self, url: str) -> "ssl.SSLContext | None":
        from penstock.wire.credentials.channels import client_context
        from penstock.wire.credentials.files import TlsFiles

        return client_context(TlsFiles(self.cert, self.cert_key, self.ca)) if url.startswith("https:") else None


NO_ACCESS = Access()


def read_settings(config: Path | None, key_file: Path | None, ca: Path | None) -> "Config":
    """With what was given on the command line, which goes before the environment and the file."""
    from penstock.core.config import load_config

    settings = load_config(config, api_key_file=key_file, tls={"ca": str(ca)} if ca else None)
    return settings.model_copy(update={"api_key": None}) if key_file else settings


def shows_key(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say what it shows, and what it shows as its first argument."""

    def run(key_file: KeyFile = None, ca: Authority = None, **options: Any) -> None:
        command(Access.of(read_settings(None, key_file, ca)), **options)

    return with_options(command, run)


def with_options(command: Callable[..., None], run: Callable[..., None]) -> Callable[..., None]:
    """`run` with the options of the command behind its first argument, before its own; what it is given itself, as
    another of these gives it, comes first."""
    _, *own = signature(command).parameters.values()
    added = [each for each in signature(run).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    first = [each for each in added if each.default is Parameter.empty]
    shown = run.__dict__["__signature__"] = Signature([*first, *own, *(each for each in added if each not in first)])
    run.__annotations__ = {name: each.annotation for name, each in shown.parameters.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
