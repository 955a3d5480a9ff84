"""What a client is made with: the server's address, the key that it shows and the certificates that it goes by."""

import re
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal, TypedDict

from penstock.client.retries import Retries
from penstock.core.errors import ConfigError, InvalidRequest
from penstock.wire.channels import UNIX, Channels
from penstock.wire.credentials.files import NO_FILES, TlsFiles

DEFAULT_PORT = 50051
SCHEMES = {"grpc": False, "http": False, "grpcs": True, "https": True}  # and whether they are TLS
HEADER = re.compile(r"[\x21-\x7e]+")


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of both clients."""

    api_key: str | None  # what `penstock key create` showed
    tls: bool | None  # None: where the address or a certificate says so
    ca: str | PathLike[str] | None  # PEM of the authorities to trust; None: the system's
    cert: str | PathLike[str] | None  # PEM of the client's own certificate, for servers that ask for one
    cert_key: str | PathLike[str] | None
    retries: Retries | None  # None: as they are by default; Retries(attempts=1): none
    direct: bool | Literal["auto"]  # past gateways to workers, where that can be; auto: once a model is asked often
    hedge_after_s: float | None  # without an answer for so long, inference is asked for once more elsewhere


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and how it is called."""

    target: str  # as gRPC has it
    channels: Channels
    is_secure: bool  # it is TLS
    files: TlsFiles

    def of_worker(self, *, is_tls: bool) -> Channels:
        """To a worker's own door: the key is not for it."""
        return Channels("", self.files if is_tls else NO_FILES, is_secure=is_tls)


def read_server(address: str, options: ClientOptions) -> ServerAddress:
    """Raises for an address or a key that cannot be one, and for certificates that do not fit together."""
    if unknown := options.keys() - ClientOptions.__annotations__.keys():
        raise TypeError(f"got an unexpected keyword argument '{min(unknown)}'")
    files = read_tls_files(options)
    target, is_tls = read_address(address)
    wants_tls = options.get("tls")
    if wants_tls is None:
        wants_tls = is_tls or (is_tls is None and not files.is_empty and not target.startswith(UNIX))
    if wants_tls and is_tls is False:
        raise InvalidRequest(f"{address} is plain, and tls=True asks for TLS: write https:// or host:port")
    if not wants_tls and not files.is_empty and not target.startswith(UNIX):
        raise InvalidRequest(f"certificates are for TLS, and {address} is plain: write https:// or host:port")
    return ServerAddress(target, Channels(read_key(options), files, is_secure=wants_tls), wants_tls, files)


def read_key(options: ClientOptions) -> str:
    key = (options.get("api_key") or "").strip()
    if key and not HEADER.fullmatch(key):
        raise InvalidRequest("api_key has characters that no key has: give it as `penstock key create` showed it")
    return key


def read_tls_files(options: ClientOptions) -> TlsFiles:
    cert, key, ca = (options.get("cert"), options.get("cert_key"), options.get("ca"))
    if bool(cert) != bool(key):
        raise ConfigError("a certificate and its key belong together: give both, cert and cert_key")
    return TlsFiles(*(fspath(each) if each else "" for each in (cert, key, ca)))


def read_address(address: str) -> tuple[str, bool | None]:
    """The target, and whether it is TLS; None: the address does not say."""
    scheme, found, rest = address.strip().partition("://")
    if not found:
        return scheme, None
    if scheme.lower() not in SCHEMES:
        return address.strip(), None  # gRPC's own: dns://…
    rest = rest.rstrip("/")
    if not rest or "/" in rest or "@" in rest:
        raise InvalidRequest(f"{address} is no server's address: write HOST:PORT or https://HOST:PORT")
    has_port = re.search(r":[0-9]+$", rest) is not None
    return rest if has_port else f"{rest}:{DEFAULT_PORT}", SCHEMES[scheme.lower()]
