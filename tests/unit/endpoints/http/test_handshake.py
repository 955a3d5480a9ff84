"""A TLS connection may be closed and aborted in any order, on every Python that Penstock runs on."""

import asyncio
import ssl
from pathlib import Path

import pytest

from penstock.core.config import Limits
from penstock.endpoints.connection_limits import ConnectionLimits
from penstock.endpoints.held_bytes import Transit
from penstock.endpoints.http.handshake import add_tls
from penstock.wire.credentials.authority import CA_FILE, Authority
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.credentials.tls_files import TlsFiles


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.opened.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    issued = Authority.create(tmp_path, "a test's authority", 10).issue("server", ("localhost",))
    return Certificates(TlsFiles(str(issued.cert), str(issued.key), str(tmp_path / CA_FILE)), "none")


async def test_a_connection_that_was_closed_twice_can_be_aborted(certificates: Certificates) -> None:
    limits = Limits()
    connection = Connection()
    make = add_tls(lambda: connection, ConnectionLimits(limits, Transit(limits), lambda _: None, 10), certificates)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        context = ssl.create_default_context(cafile=certificates.files.ca)
        address = server.sockets[0].getsockname()
        _, client = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
        await asyncio.wait_for(connection.opened.wait(), 10)
        connection.transport.close()
        connection.transport.close()
        assert connection.transport.is_closing()
        assert connection.transport.get_write_buffer_size() >= 0
        connection.transport.abort()
        await asyncio.wait_for(connection.lost.wait(), 10)
        assert connection.transport.get_write_buffer_size() == 0
        client.transport.abort()
