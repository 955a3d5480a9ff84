"""An HTTP/3 client for tests."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent

ANSWER_S = 60.0


class Http3Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Http3Client(QuicConnectionProtocol):
    """An HTTP/3 connection that sends one request at a time."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)  # type: ignore[arg-type]
        self._http = H3Connection(self._quic)
        self._answer: asyncio.Future[Http3Answer] = asyncio.get_running_loop().create_future()
        self._headers: dict[str, str] = {}
        self._body = b""

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Http3Answer:
        """Send a request, and return its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._headers, self._body = {}, b""
        stream = self._quic.get_next_available_stream_id()
        names = {":method": method, ":scheme": "https", ":authority": "localhost", ":path": path, **(headers or {})}
        encoded = [(name.encode(), value.encode()) for name, value in names.items()]
        self._http.send_headers(stream, encoded, end_stream=not body)
        if body:
            self._http.send_data(stream, body, end_stream=True)
        self.transmit()
        async with asyncio.timeout(ANSWER_S):
            return await self._answer

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, ConnectionTerminated) and not self._answer.done():
            self._answer.set_exception(ConnectionError(event.reason_phrase))
        for each in self._http.handle_event(event):
            self._received(each)

    def _received(self, event: H3Event) -> None:
        if isinstance(event, HeadersReceived):
            self._headers |= {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, DataReceived):
            self._body += event.data
        if isinstance(event, HeadersReceived | DataReceived) and event.stream_ended and not self._answer.done():
            self._answer.set_result(Http3Answer(int(self._headers[":status"]), self._headers, self._body))


@asynccontextmanager
async def http3(port: int, ca: str) -> AsyncIterator[Http3Client]:
    """Connect to this machine's port."""
    configuration = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name="localhost")
    configuration.load_verify_locations(cafile=ca)
    async with connect("127.0.0.1", port, configuration=configuration, create_protocol=Http3Client) as client:
        assert isinstance(client, Http3Client)
        yield client
