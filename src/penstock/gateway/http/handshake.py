"""A connection's way into TLS: within a time, and counted like every connection, before HTTP hears of it."""

import asyncio
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.gateway.turnstile import Turnstile
from penstock.wire.credentials.certificates import Certificates, ClientAuth

CLOSE_S = 5.0  # what a client gets to say that it has heard the end


def secured(
    make: Callable[..., asyncio.Protocol],
    turnstile: Turnstile,
    certificates: Certificates,
    client_auth: ClientAuth | None = None,
) -> Callable[..., asyncio.Protocol]:
    """Behind TLS, where there is a certificate; `client_auth`: where it is not as the settings say."""
    if not certificates.is_serving:
        return make
    context, outside = certificates.server_context(client_auth), turnstile.again()

    def behind(**options: Any) -> Any:
        return Handshake(context, outside, partial(make, **options))

    return behind


class Handshake(SSLProtocol):
    """What an event loop puts between a connection and its protocol, and counted: there, one that says nothing costs
    nobody's share, and no protocol hears of it."""

    def __init__(self, context: Any, turnstile: Turnstile, make: Callable[[], asyncio.Protocol]) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            make(),
            context,
            waiter=None,  # type: ignore[arg-type]  # nobody waits
            server_side=True,
            ssl_handshake_timeout=turnstile.limits.header_timeout_s,  # type: ignore[arg-type]
            ssl_shutdown_timeout=CLOSE_S,
        )
        self._turnstile = turnstile
        self._address: str | None = None  # once it is let in

    def connection_made(self, transport: Any) -> None:
        address = (transport.get_extra_info("peername") or ("",))[0]
        if self._turnstile.let_in(address):
            self._address = address
            super().connection_made(transport)
        else:
            transport.abort()

    def _get_write_buffer_size(self) -> int:
        """What waits below TLS waits as well: there most of a large answer is."""
        waiting: int = super()._get_write_buffer_size()  # type: ignore[misc]
        below: Any = self._transport
        return waiting + (0 if below is None else below.get_write_buffer_size())

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._turnstile.left(self._address)
            self._address = None
            super().connection_lost(exc)
