"""One bidirectional stream that many requests share; each answer finds its request by id."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from typing import Any

import grpc

from penstock.client import faults
from penstock.client.messages import is_partial
from penstock.core.errors import Cancelled, Forbidden, InvalidRequest, Overloaded, PenstockError, Unauthenticated
from penstock.pb.inference import grpc_service_pb2 as pb

# The server may answer in any order, so that a slow request holds up no other, and gives whole answers.
METADATA = (("penstock-unordered", "1"), ("penstock-single", "1"))
# Requests of one stream that wait for an answer; beyond it, callers wait to send theirs.
MAX_WAITING = 1024
CLOSE_S = 5.0
NOT_WRITTEN = "Internal error from Core"  # gRPC's words where a stream had ended before a request was written


class InferStream:
    def __init__(self, stub: Any, address: str) -> None:
        self._address = address
        self._prefix = secrets.token_hex(4)  # ids are in the server's logs: no two streams share them
        self._numbers = count(1)
        self._waiting: dict[str, asyncio.Future[pb.ModelInferResponse]] = {}
        self._unsent: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue(MAX_WAITING)  # None: there are no more
        self._stub = stub
        self._sent: set[str] = set()  # of those that wait
        self._writing = ""  # the last that was given to gRPC
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._ended: PenstockError | None = None
        self.heard_at = time.monotonic()  # when the last answer came
        self._answers = stub.ModelStreamInfer(self._requests(), metadata=METADATA)
        self._reader = asyncio.create_task(self._read(), name="penstock-stream")

    def __len__(self) -> int:
        """Requests that wait for their answer."""
        return len(self._waiting)

    @property
    def is_closed(self) -> bool:
        return self._ended is not None

    async def ask(self, message: pb.ModelInferRequest) -> pb.ModelInferResponse:
        async with self._room:
            if self._ended is not None:
                raise self._ended
            message.id = f"{self._prefix}-{next(self._numbers)}"
            future: asyncio.Future[pb.ModelInferResponse] = asyncio.get_running_loop().create_future()
            self._waiting[message.id] = future
            try:
                self._unsent.put_nowait(message)
                return await future
            except asyncio.QueueFull:
                # Callers may leave while nothing is sent; what they asked for stays in line.
                raise Overloaded(f"{MAX_WAITING} requests wait to be sent: the server takes none; try later") from None
            finally:
                del self._waiting[message.id]
                self._sent.discard(message.id)

    async def close(self) -> None:
        self._end(Cancelled("the client was closed"))
        self._answers.cancel()
        await asyncio.wait([self._reader], timeout=CLOSE_S)

    async def _requests(self) -> AsyncIterator[pb.ModelInferRequest]:
        while True:
            message = await self._unsent.get()
            if message is None or self._ended is not None:
                return
            if message.id in self._waiting:  # else its caller has left
                self._sent.add(message.id)
                self._writing = message.id
                yield message

    async def _read(self) -> None:
        ended: PenstockError = faults.unreachable(self._address, "the server ended the stream")
        try:
            async for answer in self._answers:
                self.heard_at = time.monotonic()
                self._take(answer)
        except grpc.aio.AioRpcError as error:
            if error.details() == NOT_WRITTEN:
                self._sent.discard(self._writing)
                ended = await self._refusal() or ended
            else:
                ended = faults.from_call(error, self._address)
        except asyncio.CancelledError:
            ended = Cancelled("the client was closed")
            if not self.is_closed:  # not by `close`: the task itself is cancelled, with its loop
                raise
        finally:
            self._end(ended)

    async def _refusal(self) -> PenstockError | None:
        """Why the server ended the stream, which gRPC does not tell then, where it was because of who asks."""
        try:
            await self._stub.ModelReady(pb.ModelReadyRequest(name="-"), timeout=CLOSE_S)
        except grpc.aio.AioRpcError as error:
            found = faults.from_call(error, self._address)
            return found if isinstance(found, Unauthenticated | Forbidden) else None
        return None

    def _take(self, answer: pb.ModelStreamInferResponse) -> None:
        future = self._waiting.get(answer.infer_response.id)
        if future is None or future.done():
            return  # too late: its caller has left
        if answer.error_message:
            future.set_exception(faults.from_stream(answer))
        elif is_partial(answer.infer_response):
            name = answer.infer_response.model_name
            future.set_exception(InvalidRequest(f"model '{name}' may give many answers: use infer_stream()"))
        else:
            future.set_result(answer.infer_response)

    def _end(self, error: PenstockError) -> None:
        self._ended = self._ended or error
        with suppress(asyncio.QueueFull):
            self._unsent.put_nowait(None)
        for request_id, future in self._waiting.items():
            if not future.done():
                future.set_exception(error if request_id in self._sent else faults.unsent(error))
