"""Clients of one stream each, which send as fast as they may and read as slowly as they are told."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from benchmarks.chaos.repository import LOOSE
from penstock.core.tensors import pack_bytes
from penstock.experiments.load.drivers import STREAM
from penstock.pb.inference import grpc_service_pb2 as pb

FRAMES = LOOSE  # one answer to each of many requests
TICKS = "ticks"  # many answers to one request
NUMBERS = 8192  # 64 KiB of INT64
ENDLESS = 1_000_000_000
_TEXT = pack_bytes([b"x"])


@dataclass(slots=True)
class Seen:
    sent: int = 0  # taken off this client's hands: buffers on the way count, too
    received: int = 0
    wrong: int = 0
    failure: str = ""

    def details(self) -> dict[str, object]:
        return {"sent": self.sent, "received": self.received, "wrong": self.wrong, "failure": self.failure}

    def take(self, data: bytes) -> None:
        """Answer `n` is all made of the number n, whichever model gave it."""
        is_right = len(data) == 8 * NUMBERS and bool((np.frombuffer(data, np.int64) == self.received).all())
        self.wrong += not is_right
        self.received += 1


class GrpcStream:
    def __init__(self, address: str, model: str, pause_s: float | None) -> None:
        """Without a pause it reads nothing at all."""
        self.seen = Seen()
        self._address = address
        self._model = model
        self._pause_s = pause_s

    async def run(self) -> None:
        """Until it is cancelled."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            call = channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)()
            writer = asyncio.create_task(self._write(call))
            try:
                if self._pause_s is None:
                    await asyncio.Event().wait()
                while True:
                    await asyncio.sleep(self._pause_s or 0.0)
                    answer = await call.read()
                    if answer is grpc.aio.EOF or answer.error_message:
                        raise ConnectionError("the stream ended" if answer is grpc.aio.EOF else answer.error_message)
                    self.seen.take(answer.infer_response.raw_output_contents[0])
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                self.seen.failure = f"{type(error).__name__}: {error}"[:400]
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while self._model == FRAMES or not self.seen.sent:
            message = pb.ModelInferRequest(model_name=self._model)
            for name, datatype, shape, data in tensors(self._model, self.seen.sent):
                message.inputs.add(name=name, datatype=datatype, shape=shape)
                message.raw_input_contents.append(data)
            await call.write(message.SerializeToString())
            self.seen.sent += 1


class WebSocketStream:
    def __init__(self, address: str, model: str, pause_s: float | None) -> None:
        """Without a pause it reads nothing at all."""
        self.seen = Seen()
        self._url = f"ws://{address}/v2/models/{model}/stream"
        self._model = model
        self._pause_s = pause_s

    async def run(self) -> None:
        """Until it is cancelled."""
        # It reads no further ahead than one message, and asks for no sign of life that waits behind what is not read.
        options: dict[str, Any] = {"max_queue": 1, "ping_interval": None, "compression": None, "max_size": None}
        connection = await connect(self._url, proxy=None, **options)
        writer = asyncio.create_task(self._write(connection))
        try:
            if self._pause_s is None:
                await asyncio.Event().wait()
            while True:
                await asyncio.sleep(self._pause_s or 0.0)
                self._take(await connection.recv())
        except (WebSocketException, OSError) as error:
            self.seen.failure = f"{type(error).__name__}: {error}"[:400]
        finally:
            writer.cancel()
            connection.transport.abort()  # a server that reads nothing would not hear a good-bye
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, connection: Any) -> None:
        while self._model == FRAMES or not self.seen.sent:
            given = list(tensors(self._model, self.seen.sent))
            inputs = [
                {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
                for name, kind, shape, data in given
            ]
            header = json.dumps({"id": str(self.seen.sent), "inputs": inputs}).encode()
            length = len(header).to_bytes(4, "little")
            await connection.send(b"".join([length, header, *(data for *_, data in given)]))
            self.seen.sent += 1

    def _take(self, answer: str | bytes) -> None:
        if isinstance(answer, str):
            raise ConnectionError(answer)
        end = 4 + int.from_bytes(answer[:4], "little")
        size = json.loads(answer[4:end])["outputs"][0]["parameters"]["binary_data_size"]
        self.seen.take(answer[end : end + size])


def tensors(model: str, number: int) -> list[tuple[str, str, list[int], bytes]]:
    """Name, datatype, shape and bytes of the inputs of a model's request."""
    if model == TICKS:
        return [("count", "INT64", [1], np.array([ENDLESS], np.int64).tobytes())]
    return [
        ("n", "INT64", [1, NUMBERS], np.full(NUMBERS, number, np.int64).tobytes()),
        ("s", "BYTES", [1, 1], _TEXT),
    ]
