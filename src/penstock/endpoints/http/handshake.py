"""TLS handshakes with a time limit, counted against the limits on connections."""

import asyncio
import re
from asyncio.sslproto import SSLProtocol, _SSLProtocolTransport
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.endpoints.connection_limits import ConnectionLimits
from penstock.wire.credentials.certificates import Certificates, ClientAuth

TLS_RECORD = 0x16  # the first byte of a TLS handshake
HTTP_START = re.compile(rb"[A-Z]{3,7} ")
PLAIN_HTTP_ERROR = (
    b'{"error":{"code":"invalid_request","message":"this port uses TLS: write https:// instead of http://"}}'
)
PLAIN_HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(PLAIN_HTTP_ERROR), PLAIN_HTTP_ERROR)
)
CLOSE_S = 5.0  # time for the client to confirm the end of the TLS connection


def add_tls(
    make: Callable[..., asyncio.Protocol],
    connection_limits: ConnectionLimits,
    certificates: Certificates,
    client_auth: ClientAuth | None = None,
) -> Callable[..., asyncio.Protocol]:
    """Return a protocol factory behind TLS, or `make` itself if no certificate is set.

    `client_auth` overrides the setting for client certificates.
    """
    if not certificates.is_serving:
        return make
    context, handshake_limits = certificates.create_server_context(client_auth), connection_limits.copy_uncounted()

    def make_handshake(**options: Any) -> Any:
        return Handshake(context, handshake_limits, partial(make, **options))

    return make_handshake


class TlsTransport(_SSLProtocolTransport):
    """The transport that the HTTP protocols write to. Unlike asyncio's, it still works after a second `close`."""

    def close(self) -> None:
        if not self.is_closing():
            super().close()


class Handshake(SSLProtocol):
    """asyncio's TLS layer with limits: clients that stall in the handshake do not use up the connections of others.

    It overrides private parts of `asyncio.sslproto.SSLProtocol`; tests/unit/endpoints/http/test_library_internals.py
    fails if a new Python changes them.
    """

    def __init__(self, context: Any, connection_limits: ConnectionLimits, make: Callable[[], asyncio.Protocol]) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            make(),
            context,
            waiter=None,  # type: ignore[arg-type]  # nothing waits for the handshake
            server_side=True,
            ssl_handshake_timeout=connection_limits.limits.header_timeout_s,  # type: ignore[arg-type]
            ssl_shutdown_timeout=CLOSE_S,
        )
        self._connection_limits = connection_limits
        self._address: str | None = None  # set once the connection is counted
        self._has_received = False

    def connection_made(self, transport: Any) -> None:
        address = (transport.get_extra_info("peername") or ("",))[0]
        if self._connection_limits.try_open(address):
            self._address = address
            super().connection_made(transport)
        else:
            transport.abort()

    def buffer_updated(self, nbytes: int) -> None:
        """Answer a plain HTTP request with the advice to use TLS; pass other data to the TLS layer."""
        if not self._has_received:
            self._has_received = True
            buffer: bytearray = self._ssl_buffer  # type: ignore[attr-defined]
            start = bytes(buffer[: min(nbytes, 8)])
            if start[0] != TLS_RECORD and HTTP_START.match(start):
                transport: Any = self._transport
                transport.write(PLAIN_HTTP_ANSWER)
                transport.close()
                return
        super().buffer_updated(nbytes)

    def _get_app_transport(self) -> _SSLProtocolTransport:
        if self._app_transport is None:
            self._app_transport = TlsTransport(self._loop, self)
            self._app_transport_created = True
        return self._app_transport

    def _get_write_buffer_size(self) -> int:
        """Return the unsent bytes, including those in the transport below TLS, which holds most of a large answer."""
        waiting: int = super()._get_write_buffer_size()  # type: ignore[misc]
        below: Any = self._transport
        return waiting + (0 if below is None else below.get_write_buffer_size())

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._connection_limits.count_close(self._address)
            self._address = None
            super().connection_lost(exc)
