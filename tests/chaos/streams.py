"""Clients that send on one stream as fast as allowed, and read answers slowly."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from penstock.core.tensors import Tensor, pack_bytes
from penstock.experiments.load.drivers import STREAM
from penstock.experiments.load.payloads import Payload
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.repository import ANY_SIZE_MODEL

FRAMES = ANY_SIZE_MODEL  # one answer to each of many requests
TICKS = "ticks"  # many answers to one request
NUMBERS = 8192  # 64 KiB of INT64
ENDLESS = 1_000_000_000
SIZE = "binary_data_size"
_TEXT = pack_bytes([b"x"])


@dataclass(slots=True)
class StreamTally:
    sent: int = 0  # bytes that this client received, including those in buffers
    received: int = 0
    wrong: int = 0
    failure: str = ""

    def take(self, data: bytes) -> None:
        """Check an answer: all elements of answer number n must be n."""
        is_right = len(data) == 8 * NUMBERS and bool((np.frombuffer(data, np.int64) == self.received).all())
        self.wrong += not is_right
        self.received += 1


class SlowStream:
    """A stream that reads slowly; without a pause it reads nothing at all."""

    def __init__(self, address: str, model: str, pause_s: float | None) -> None:
        self.seen = StreamTally()
        self._address = address
        self._model = model
        self._pause_s = pause_s

    async def _exchange(self, send: Callable[[bytes], Awaitable[Any]], read: Callable[[], Awaitable[bytes]]) -> None:
        """Run until it is cancelled or the stream fails."""
        writer = asyncio.create_task(self._write(send))
        try:
            if self._pause_s is None:
                await asyncio.Event().wait()
            while True:
                await asyncio.sleep(self._pause_s or 0.0)
                self.seen.take(await read())
        except (grpc.aio.AioRpcError, WebSocketException, OSError) as error:
            self.seen.failure = f"{type(error).__name__}: {error}"[:400]
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, send: Callable[[bytes], Awaitable[Any]]) -> None:
        while self._model == FRAMES or not self.seen.sent:
            await send(self._encode(make_tensors(self._model, self.seen.sent)))
            self.seen.sent += 1

    def _encode(self, inputs: tuple[Tensor, ...]) -> bytes:
        raise NotImplementedError


class GrpcStream(SlowStream):
    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            call = channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)()

            async def read() -> bytes:
                answer = await call.read()
                if answer is grpc.aio.EOF or answer.error_message:
                    raise ConnectionError("the stream ended" if answer is grpc.aio.EOF else answer.error_message)
                return bytes(answer.infer_response.raw_output_contents[0])

            try:
                await self._exchange(call.write, read)
            finally:
                call.cancel()

    def _encode(self, inputs: tuple[Tensor, ...]) -> bytes:
        return Payload(self._model, inputs).grpc()


class WebSocketStream(SlowStream):
    async def run(self) -> None:
        # It prefetches at most one message, and sends no pings, which would wait behind unread data.
        options: dict[str, Any] = {"max_queue": 1, "ping_interval": None, "compression": None, "max_size": None}
        url = f"ws://{self._address}/v2/models/{self._model}/stream"
        connection = await connect(url, proxy=None, **options)

        async def read() -> bytes:
            answer = await connection.recv()
            if isinstance(answer, str):
                raise ConnectionError(answer)
            end = 4 + int.from_bytes(answer[:4], "little")
            size = json.loads(answer[4:end])["outputs"][0]["parameters"][SIZE]
            return answer[end : end + size]

        try:
            await self._exchange(connection.send, read)
        finally:
            connection.transport.abort()  # a server that reads nothing would not receive a closing handshake

    def _encode(self, inputs: tuple[Tensor, ...]) -> bytes:
        described = [
            {"name": each.name, "datatype": each.datatype, "shape": each.shape, "parameters": {SIZE: len(each.data)}}
            for each in inputs
        ]
        header = json.dumps({"id": str(self.seen.sent), "inputs": described}).encode()
        return b"".join([len(header).to_bytes(4, "little"), header, *(each.data for each in inputs)])


def make_tensors(model: str, number: int) -> tuple[Tensor, ...]:
    """Return the inputs of a request to `model`."""
    if model == TICKS:
        return (Tensor("count", "INT64", (1,), np.array([ENDLESS], np.int64).tobytes()),)
    numbers = Tensor("n", "INT64", (1, NUMBERS), np.full(NUMBERS, number, np.int64).tobytes())
    return numbers, Tensor("s", "BYTES", (1, 1), _TEXT)
