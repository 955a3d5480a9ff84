"""The options of a client: the server's address, the API key and the certificates."""

import re
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal, TypedDict

from penstock.client.retries import Retries
from penstock.core.errors import ConfigError, InvalidRequest
from penstock.wire.channels import UNIX_PREFIX, Channels
from penstock.wire.credentials.tls_files import NO_FILES, TlsFiles

DEFAULT_PORT = 50051
SCHEMES = {"grpc": False, "http": False, "grpcs": True, "https": True}  # whether a scheme uses TLS
HEADER = re.compile(r"[\x21-\x7e]+")


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of both clients."""

    api_key: str | None  # the text that `penstock key create` printed
    tls: bool | None  # None: use TLS if the address or a certificate requires it
    ca: str | PathLike[str] | None  # PEM file of trusted authorities; None: the system's
    cert: str | PathLike[str] | None  # PEM file of the client's certificate, for servers that require one
    cert_key: str | PathLike[str] | None  # PEM file of its private key
    retries: Retries | None  # None: the defaults; Retries(attempts=1): no retries
    direct: bool | Literal["auto"]  # call workers without a gateway; auto: for models in frequent use
    hedge_after_s: (
        float | None
    )  # if no answer has arrived after this time, send the request over a second connection, too


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server, and how to connect to it."""

    target: str  # for gRPC
    channels: Channels
    is_secure: bool  # TLS is used
    files: TlsFiles

    def of_worker(self, *, is_tls: bool) -> Channels:
        """Return the options to connect to a worker's direct endpoint, which must never receive the API key."""
        return Channels("", self.files if is_tls else NO_FILES, is_secure=is_tls)


def read_server(address: str, options: ClientOptions) -> ServerAddress:
    """Read the address and the options; raise InvalidRequest or ConfigError if they are invalid or contradictory."""
    if unknown := options.keys() - ClientOptions.__annotations__.keys():
        raise TypeError(f"got an unexpected keyword argument '{min(unknown)}'")
    files = read_tls_files(options)
    target, is_tls = read_address(address)
    wants_tls = options.get("tls")
    if wants_tls is None:
        wants_tls = is_tls or (is_tls is None and not files.is_empty and not target.startswith(UNIX_PREFIX))
    if wants_tls and is_tls is False:
        raise InvalidRequest(f"{address} excludes TLS, but tls=True requires it: write https:// or host:port")
    if not wants_tls and not files.is_empty and not target.startswith(UNIX_PREFIX):
        raise InvalidRequest(
            f"certificates require TLS, but {address} or tls=False excludes it: write https:// or host:port"
        )
    return ServerAddress(target, Channels(read_key(options), files, is_secure=wants_tls), wants_tls, files)


def read_key(options: ClientOptions) -> str:
    key = (options.get("api_key") or "").strip()
    if key and not HEADER.fullmatch(key):
        raise InvalidRequest("api_key contains invalid characters: give the text that `penstock key create` printed")
    return key


def read_tls_files(options: ClientOptions) -> TlsFiles:
    cert, key, ca = (options.get("cert"), options.get("cert_key"), options.get("ca"))
    if bool(cert) != bool(key):
        raise ConfigError("a certificate needs its private key: give both cert and cert_key")
    return TlsFiles(*(fspath(each) if each else "" for each in (cert, key, ca)))


def read_address(address: str) -> tuple[str, bool | None]:
    """Return the gRPC target, and whether the address requires TLS (None if the address does not specify this)."""
    scheme, found, rest = address.strip().partition("://")
    if not found:
        return scheme, None
    if scheme.lower() not in SCHEMES:
        return address.strip(), None  # an address scheme of gRPC itself, for example dns://
    rest = rest.rstrip("/")
    if not rest or "/" in rest or "@" in rest:
        raise InvalidRequest(f"{address} is not a server address: write HOST:PORT or https://HOST:PORT")
    has_port = re.search(r":[0-9]+$", rest) is not None
    return rest if has_port else f"{rest}:{DEFAULT_PORT}", SCHEMES[scheme.lower()]
