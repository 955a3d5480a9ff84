"""Drivers that send the load generator's requests over unary gRPC, gRPC streams or REST."""

import asyncio
import ssl
from typing import Any, Protocol, cast

import grpc
import httptools

from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import PLAIN_CHANNELS, Channels

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
ECHO = "/echo.Echo/Echo"
CONNECT_S = 10.0
TIMEOUT_S = 60.0
EAGER_CONNECTIONS = 256
MESSAGE_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Rejected(Exception):
    """The server answered a request with an error; the message is the reason."""


class Driver(Protocol):
    async def open(self, concurrency: int) -> None: ...

    async def call(self, slot: int, number: int) -> None:
        """Send request `number` and wait for its answer. Raise `Rejected` if the server answers with an error."""
        ...

    async def close(self) -> None: ...


class UnaryDriver:
    def __init__(
        self, target: str, messages: list[bytes], method: str = INFER, channels: Channels = PLAIN_CHANNELS
    ) -> None:
        self._messages = messages
        self._channel = channels.open(target, MESSAGE_OPTIONS)
        # Requests are serialized in advance and answers are not parsed, so that the client needs little CPU.
        self._call = self._channel.unary_unary(method)

    async def open(self, concurrency: int) -> None:
        await asyncio.wait_for(self._channel.channel_ready(), CONNECT_S)

    async def call(self, slot: int, number: int) -> None:
        try:
            await self._call(self._messages[number % len(self._messages)], timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise Rejected(error.code().name) from None

    async def close(self) -> None:
        await self._channel.close()


class StreamDriver:
    """Sends requests over a few bidirectional gRPC streams; answers come in any order and are matched by id."""

    most = 4  # streams

    def __init__(self, target: str, messages: list[bytes], channels: Channels = PLAIN_CHANNELS) -> None:
        self._messages = messages
        self._channel = channels.open(target, MESSAGE_OPTIONS)
        self._outboxes: list[asyncio.Queue[bytes]] = []
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, concurrency: int) -> None:
        await asyncio.wait_for(self._channel.channel_ready(), CONNECT_S)
        stub = self._channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)
        for _ in range(min(self.most, concurrency)):
            outbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=10_000)
            call = stub(metadata=(("penstock-unordered", "1"),))
            self._outboxes.append(outbox)
            self._tasks += [asyncio.create_task(self._write(call, outbox)), asyncio.create_task(self._read(call))]

    async def call(self, slot: int, number: int) -> None:
        identity = str(number)
        future = self._pending[identity] = asyncio.get_running_loop().create_future()
        # Append field 3, the request's id, to the serialized message.
        tail = b"\x1a" + bytes([len(identity)]) + identity.encode()
        self._outboxes[slot % len(self._outboxes)].put_nowait(self._messages[number % len(self._messages)] + tail)
        timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self._complete_call, identity, "timeout")
        try:
            await future
        finally:
            timer.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self, call: Any, outbox: "asyncio.Queue[bytes]") -> None:
        while True:
            await call.write(await outbox.get())

    async def _read(self, call: Any) -> None:
        try:
            async for answer in call:
                found = answer.infer_response
                self._complete_call(
                    found.id, found.parameters["penstock-code"].string_param if answer.error_message else None
                )
        except grpc.aio.AioRpcError as error:
            # Requests do not record their stream, so all pending requests fail.
            for identity in list(self._pending):
                self._complete_call(identity, error.code().name)

    def _complete_call(self, identity: str, refusal: str | None) -> None:
        future = self._pending.pop(identity, None)
        if future is None or future.done():
            return
        if refusal is None:
            future.set_result(None)
        else:
            future.set_exception(Rejected(refusal))


class RestDriver:
    """Sends REST requests over persistent connections, each of which carries one request at a time."""

    def __init__(self, target: str, messages: list[bytes], context: ssl.SSLContext | None = None) -> None:
        self._messages = messages
        self._context = context
        self._host, _, self._port = target.rpartition(":")
        self._free: list[HttpConnection] = []
        self._permits = asyncio.Semaphore(1)

    async def open(self, concurrency: int) -> None:
        self._permits = asyncio.Semaphore(concurrency)
        self._free = [await self._connect() for _ in range(min(concurrency, EAGER_CONNECTIONS))]

    def _make(self) -> "HttpConnection":
        return HttpConnection()

    async def _connect(self) -> "HttpConnection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(self._make, self._host, int(self._port), ssl=self._context)
        except OSError as error:
            raise Rejected(f"no connection: {error.strerror or error}") from None
        return connection

    async def call(self, slot: int, number: int) -> None:
        async with self._permits:
            connection = await self._take()
            status = await connection.request(self._messages[number % len(self._messages)])
            self._give(connection)
        if status != 200:
            raise Rejected(str(status))

    async def _take(self) -> "HttpConnection":
        connection = self._free.pop() if self._free else await self._connect()
        if connection.is_lost:  # the server closed it between windows
            connection = await self._connect()
        return connection

    def _give(self, connection: "HttpConnection") -> None:
        if connection.is_kept:
            self._free.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        for connection in self._free:
            connection.close()


class HttpConnection(asyncio.Protocol):
    timeout_s = TIMEOUT_S

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: asyncio.Future[int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_lost = False
        self.is_kept = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def request(self, message: bytes) -> "asyncio.Future[int]":
        assert self._transport is not None
        assert self._answer is None or self._answer.done(), "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._answer = self._loop.create_future()
        self._timer = self._loop.call_later(self.timeout_s, self._end, "timeout")
        self._transport.write(message)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.is_kept = self._parser.should_keep_alive()
        assert self._timer is not None
        self._timer.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        self._end("connection lost")

    def _end(self, reason: str) -> None:
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Rejected(reason))
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
