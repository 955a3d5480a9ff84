"""How a request travels from the load generator: gRPC unary, gRPC streams, REST, or a bare echo."""

import asyncio
from typing import Any, Protocol, cast

import grpc
import httptools

from penstock.bench.payloads import Payload
from penstock.pb.inference import grpc_service_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
ECHO = "/echo.Echo/Echo"
STREAMS = 4
TIMEOUT_S = 60.0
_MESSAGE_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Rejected(Exception):
    """The server answered with an error."""


class Driver(Protocol):
    async def open(self, concurrency: int) -> None: ...

    async def call(self, slot: int, number: int) -> None:
        """Sends request `number`; returns when it is answered, raises Rejected."""
        ...

    async def close(self) -> None: ...


class UnaryDriver:
    def __init__(self, target: str, payloads: list[Payload], method: str = INFER) -> None:
        self._messages = [payload.grpc() for payload in payloads]
        self._channel = grpc.aio.insecure_channel(target, options=_MESSAGE_OPTIONS)
        # Requests are bytes already and answers are not looked into: the server is measured, not this.
        self._call = self._channel.unary_unary(method)

    async def open(self, concurrency: int) -> None:
        await asyncio.wait_for(self._channel.channel_ready(), TIMEOUT_S)

    async def call(self, slot: int, number: int) -> None:
        try:
            await self._call(self._messages[number % len(self._messages)], timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise Rejected(error.code().name) from None

    async def close(self) -> None:
        await self._channel.close()


class StreamDriver:
    """A few bidirectional streams carry all requests; answers come as they are done, matched by id."""

    def __init__(self, target: str, payloads: list[Payload]) -> None:
        self._messages = [payload.grpc() for payload in payloads]
        self._channel = grpc.aio.insecure_channel(target, options=_MESSAGE_OPTIONS)
        self._outboxes: list[asyncio.Queue[bytes]] = []
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, concurrency: int) -> None:
        await asyncio.wait_for(self._channel.channel_ready(), TIMEOUT_S)
        stub = self._channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)
        for _ in range(min(STREAMS, concurrency)):
            outbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=10_000)
            call = stub(metadata=(("penstock-unordered", "1"),))
            self._outboxes.append(outbox)
            self._tasks += [asyncio.create_task(self._write(call, outbox)), asyncio.create_task(self._read(call))]

    async def call(self, slot: int, number: int) -> None:
        identity = str(number)
        future = self._pending[identity] = asyncio.get_running_loop().create_future()
        # Field 3 appended to the built message: the request's id.
        tail = b"\x1a" + bytes([len(identity)]) + identity.encode()
        self._outboxes[slot % len(self._outboxes)].put_nowait(self._messages[number % len(self._messages)] + tail)
        await asyncio.wait_for(future, TIMEOUT_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self, call: Any, outbox: "asyncio.Queue[bytes]") -> None:
        while True:
            await call.write(await outbox.get())

    async def _read(self, call: Any) -> None:
        async for answer in call:
            future = self._pending.pop(answer.infer_response.id, None)
            if future is None or future.done():
                continue
            if answer.error_message:
                future.set_exception(Rejected(answer.infer_response.parameters["penstock-code"].string_param))
            else:
                future.set_result(None)


class RestDriver:
    """One kept connection per slot."""

    def __init__(self, target: str, payloads: list[Payload]) -> None:
        self._messages = [payload.rest() for payload in payloads]
        self._host, _, self._port = target.rpartition(":")
        self._connections: list[_HttpConnection] = []

    async def open(self, concurrency: int) -> None:
        self._connections = [await self._connect() for _ in range(concurrency)]

    async def _connect(self) -> "_HttpConnection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_HttpConnection, self._host, int(self._port))
        return connection

    async def call(self, slot: int, number: int) -> None:
        connection = self._connections[slot % len(self._connections)]
        if connection.is_lost:  # kept too long between windows
            connection = self._connections[slot % len(self._connections)] = await self._connect()
        status = await connection.request(self._messages[number % len(self._messages)])
        if status != 200:
            raise Rejected(str(status))

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _HttpConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: asyncio.Future[int] | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def request(self, message: bytes) -> "asyncio.Future[int]":
        assert self._transport is not None
        assert self._answer is None or self._answer.done(), "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._answer = self._loop.create_future()
        self._transport.write(message)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Rejected("connection lost"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def make_driver(protocol: str, target: str, payloads: list[Payload]) -> Driver:
    if protocol == "grpc":
        return UnaryDriver(target, payloads)
    if protocol == "stream":
        return StreamDriver(target, payloads)
    if protocol == "rest":
        return RestDriver(target, payloads)
    if protocol == "echo":
        return UnaryDriver(target, payloads, ECHO)
    raise ValueError(f"unknown protocol {protocol}")
