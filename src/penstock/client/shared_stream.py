"""A bidirectional stream that many requests share; answers are matched to requests by id."""

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

# The server may answer in any order, so that a slow request delays no other request, and sends only complete answers.
METADATA = (("penstock-unordered", "1"), ("penstock-single", "1"))
# Requests of one stream that wait for an answer; further callers wait before they send.
MAX_WAITING = 1024
CLOSE_S = 5.0
NOT_WRITTEN = "Internal error from Core"  # gRPC's error if a stream ended before a request was written


class InferStream:
    def __init__(self, stub: Any, address: str) -> None:
        self._address = address
        self._prefix = secrets.token_hex(
            4
        )  # makes ids unique across streams, because the server's logs contain the ids
        self._numbers = count(1)
        self._waiting: dict[str, asyncio.Future[pb.ModelInferResponse]] = {}
        self._unsent: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue(MAX_WAITING)  # None: end of the stream
        self._stub = stub
        self._sent: set[str] = set()  # ids of waiting requests that were sent
        self._writing = ""  # the id that was most recently passed to gRPC
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._ended: PenstockError | None = None
        self.answered_at = time.monotonic()  # when the last answer came
        self._answers = stub.ModelStreamInfer(self._generate_requests(), metadata=METADATA)
        self._reader = asyncio.create_task(self._read_answers(), name="penstock-stream")

    def __len__(self) -> int:
        """Return the number of requests that wait for an answer."""
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
                # The requests of cancelled calls stay in the queue until the stream sends again.
                raise Overloaded(
                    f"{MAX_WAITING} requests wait to be sent, because the server reads none; try again later"
                ) from None
            finally:
                del self._waiting[message.id]
                self._sent.discard(message.id)

    async def close(self) -> None:
        self._end_stream(Cancelled("the client was closed"))
        self._answers.cancel()
        await asyncio.wait([self._reader], timeout=CLOSE_S)

    async def _generate_requests(self) -> AsyncIterator[pb.ModelInferRequest]:
        while True:
            message = await self._unsent.get()
            if message is None or self._ended is not None:
                return
            if message.id in self._waiting:  # otherwise the caller has cancelled the request
                self._sent.add(message.id)
                self._writing = message.id
                yield message

    async def _read_answers(self) -> None:
        ended: PenstockError = faults.make_unreachable_error(self._address, "the server ended the stream")
        try:
            async for answer in self._answers:
                self.answered_at = time.monotonic()
                self._deliver(answer)
        except grpc.aio.AioRpcError as error:
            if error.details() == NOT_WRITTEN:
                self._sent.discard(self._writing)
                ended = await self._find_refusal() or ended
            else:
                ended = faults.convert_call_error(error, self._address)
        except asyncio.CancelledError:
            ended = Cancelled("the client was closed")
            if not self.is_closed:  # the task was not cancelled by `close`, but because the event loop ends
                raise
        finally:
            self._end_stream(ended)

    async def _find_refusal(self) -> PenstockError | None:
        """Return the authentication or permission error that ended the stream, or None; gRPC reports another error."""
        try:
            await self._stub.ModelReady(pb.ModelReadyRequest(name="-"), timeout=CLOSE_S)
        except grpc.aio.AioRpcError as error:
            found = faults.convert_call_error(error, self._address)
            return found if isinstance(found, Unauthenticated | Forbidden) else None
        return None

    def _deliver(self, answer: pb.ModelStreamInferResponse) -> None:
        future = self._waiting.get(answer.infer_response.id)
        if future is None or future.done():
            return  # the caller has cancelled the request
        if answer.error_message:
            future.set_exception(faults.convert_stream_error(answer))
        elif is_partial(answer.infer_response):
            name = answer.infer_response.model_name
            future.set_exception(InvalidRequest(f"model '{name}' may return several answers: use infer_stream()"))
        else:
            future.set_result(answer.infer_response)

    def _end_stream(self, error: PenstockError) -> None:
        self._ended = self._ended or error
        with suppress(asyncio.QueueFull):
            self._unsent.put_nowait(None)
        for request_id, future in self._waiting.items():
            if not future.done():
                future.set_exception(error if request_id in self._sent else faults.mark_unsent(error))
