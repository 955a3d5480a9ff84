"""gRPC channels between the roles of a cluster: keepalive options, TLS, and the API key that calls send."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from penstock.wire.credentials.client_tls import create_client_credentials
from penstock.wire.credentials.tls_files import NO_FILES, FileStamps, TlsFiles

if TYPE_CHECKING:
    from penstock.core.config import Config

# Messages may be large, because the snapshot of a cluster is one message. Pings detect peers that are unreachable.
_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
)
MANAGER_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),  # a manager that restarts is back soon
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # despite its name: the time limit of one attempt to connect
)
MANAGER_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),
    # A gateway makes all calls of its clients on one connection.
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 8192),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
)
Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]
UNIX_PREFIX = "unix:"
CALL_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def make_bearer_header(key: str) -> Metadata:
    """Return the authorization header for an API key, for gRPC or HTTP; empty if the key is empty."""
    return (("authorization", f"Bearer {key}"),) if key else ()


class Channels:
    """Opens gRPC channels with one API key and one set of TLS files.

    Without a key, calls send no key; without TLS files, channels are plaintext. Unix sockets get neither.
    """

    def __init__(
        self, key: str | Callable[[], str] = "", tls: TlsFiles = NO_FILES, *, is_secure: bool | None = None
    ) -> None:
        """`key` may be a function that returns the key, if the key is created later; each gRPC call calls the function.

        `is_secure` turns TLS on without TLS files; then the system's certificate authorities are trusted.
        """
        self._key = key
        self._tls = tls
        self._is_secure = not tls.is_empty if is_secure is None else is_secure
        self._credentials: tuple[FileStamps, grpc.ChannelCredentials] | None = None

    @classmethod
    def from_config(cls, config: "Config") -> "Channels":
        """Create the channels of a server process or command from its configuration."""
        return cls(config.own_key(), TlsFiles.from_settings(config.tls))

    def read_stamps(self) -> FileStamps:
        """Return a value that changes when the TLS files change. Open channels do not read the files again."""
        return self._tls.read_stamps()

    def open(self, address: str, options: Options = MANAGER_CHANNEL_OPTIONS) -> Any:
        if (credentials := self._credentials_for(address)) is None:
            return self._add_key(grpc.aio.insecure_channel(address, options=options), address)
        return self._add_key(grpc.aio.secure_channel(address, credentials, options=options), address)

    def open_blocking(self, address: str, options: Options = MANAGER_CHANNEL_OPTIONS) -> Any:
        if (credentials := self._credentials_for(address)) is None:
            return self._add_key(grpc.insecure_channel(address, options=options), address)
        return self._add_key(grpc.secure_channel(address, credentials, options=options), address)

    def _credentials_for(self, address: str) -> grpc.ChannelCredentials | None:
        if not self._is_secure or address.startswith(UNIX_PREFIX):
            return None
        stamps = self.read_stamps()
        if self._credentials is None or self._credentials[0] != stamps:
            self._credentials = stamps, create_client_credentials(self._tls)
        return self._credentials[1]

    def _add_key(self, channel: Any, address: str) -> Any:
        return (
            KeyedChannel(channel, self._make_metadata) if self._key and not address.startswith(UNIX_PREFIX) else channel
        )

    def _make_metadata(self) -> Metadata:
        return make_bearer_header(self._key() if callable(self._key) else self._key)


PLAIN_CHANNELS = Channels()


class KeyedChannel:
    """A channel that adds metadata, such as the API key, to each call."""

    def __init__(self, channel: Any, metadata: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._make_metadata = metadata

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return partial(self._add_key, found) if name in CALL_KINDS else found

    async def __aenter__(self) -> "KeyedChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.__aexit__(*error)

    def _add_key(self, create_call: Callable[..., Any], *method: Any, **serializers: Any) -> "KeyedCall":
        return KeyedCall(create_call(*method, **serializers), self._make_metadata)


class KeyedCall:
    """A gRPC method that adds the metadata of its KeyedChannel to each call."""

    def __init__(self, call: Any, metadata: Callable[[], Metadata]) -> None:
        self._call = call
        self._make_metadata = metadata

    def __call__(self, *arguments: Any, metadata: Any = None, **options: Any) -> Any:
        return self._call(*arguments, metadata=(*self._make_metadata(), *(metadata or ())), **options)

    def future(self, *arguments: Any, metadata: Any = None, **options: Any) -> Any:
        """Start the call and return the call's future. Only blocking channels have this method."""
        return self._call.future(*arguments, metadata=(*self._make_metadata(), *(metadata or ())), **options)
