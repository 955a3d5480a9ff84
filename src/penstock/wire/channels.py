"""gRPC channels between the roles of a cluster: how either end notices that the other is gone, and what calls show."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from penstock.wire.credentials.channels import client_credentials
from penstock.wire.credentials.files import NO_FILES, Stamps, TlsFiles

if TYPE_CHECKING:
    from penstock.core.config import Config

# Everything of a large cluster is one message; of an end that is cut off, only an unanswered ping tells.
_BOTH = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
)
MANAGER_CHANNEL = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),  # one that was not there just now may be there at once
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # what an attempt to connect gets
)
MANAGER_SERVER = (
    *_BOTH,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),
)
Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]
UNIX = "unix:"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # of calls


def bearer(key: str) -> Metadata:
    """What a call shows, as gRPC's metadata and as headers of HTTP."""
    return (("authorization", f"Bearer {key}"),) if key else ()


class Channels:
    """Opens them. Without a key nothing is shown, and a socket of this machine asks for none; without certificates
    they are plain."""

    def __init__(
        self, key: str | Callable[[], str] = "", tls: TlsFiles = NO_FILES, *, is_secure: bool | None = None
    ) -> None:
        """`key` may be asked for with each call: one may be made later. `is_secure`: they are TLS also where no file
        says so, with the system's authorities."""
        self._key = key
        self._tls = tls
        self._is_secure = not tls.is_empty if is_secure is None else is_secure
        self._credentials: tuple[Stamps, grpc.ChannelCredentials] | None = None

    @classmethod
    def of(cls, config: "Config") -> "Channels":
        """Those of a role or a command with this configuration."""
        return cls(config.shown_key(), TlsFiles.of(config.tls))

    def stamps(self) -> Stamps:
        """Others whenever the certificates are: what is open goes by those that it was opened with."""
        return self._tls.stamps()

    def open(self, address: str, options: Options = MANAGER_CHANNEL) -> Any:
        if (credentials := self._secured(address)) is None:
            return self._keyed(grpc.aio.insecure_channel(address, options=options), address)
        return self._keyed(grpc.aio.secure_channel(address, credentials, options=options), address)

    def open_blocking(self, address: str, options: Options = MANAGER_CHANNEL) -> Any:
        if (credentials := self._secured(address)) is None:
            return self._keyed(grpc.insecure_channel(address, options=options), address)
        return self._keyed(grpc.secure_channel(address, credentials, options=options), address)

    def _secured(self, address: str) -> grpc.ChannelCredentials | None:
        if not self._is_secure or address.startswith(UNIX):
            return None
        stamps = self.stamps()
        if self._credentials is None or self._credentials[0] != stamps:
            self._credentials = stamps, client_credentials(self._tls)
        return self._credentials[1]

    def _keyed(self, channel: Any, address: str) -> Any:
        return KeyedChannel(channel, self._shown) if self._key and not address.startswith(UNIX) else channel

    def _shown(self) -> Metadata:
        return bearer(self._key() if callable(self._key) else self._key)


PLAIN = Channels()


class KeyedChannel:
    """A channel whose calls have this metadata before their own."""

    def __init__(self, channel: Any, shown: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return partial(self._keyed, found) if name in KINDS else found

    async def __aenter__(self) -> "KeyedChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.__aexit__(*error)

    def _keyed(self, make: Callable[..., Any], *method: Any, **forms: Any) -> "KeyedCall":
        return KeyedCall(make(*method, **forms), self._shown)


class KeyedCall:
    def __init__(self, call: Any, shown: Callable[[], Metadata]) -> None:
        self._call = call
        self._shown = shown

    def __call__(self, *given: Any, metadata: Any = None, **options: Any) -> Any:
        return self._call(*given, metadata=(*self._shown(), *(metadata or ())), **options)

    def future(self, *given: Any, metadata: Any = None, **options: Any) -> Any:
        """Of blocking channels alone."""
        return self._call.future(*given, metadata=(*self._shown(), *(metadata or ())), **options)
