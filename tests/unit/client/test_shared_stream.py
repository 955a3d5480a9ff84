"""A stream whose server reads nothing: the bytes that wait to be sent are bounded."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.client import shared_stream
from penstock.client.shared_stream import InferStream
from penstock.core.errors import Overloaded, Unauthenticated, Unavailable
from penstock.pb.inference import grpc_service_pb2 as pb


class Stalled:
    """A server that reads no request and gives no answer."""

    def __init__(self) -> None:
        self._cancelled = asyncio.Event()

    def ModelStreamInfer(self, requests: AsyncIterator[Any], metadata: object) -> "Stalled":
        return self

    def __aiter__(self) -> "Stalled":
        return self

    async def __anext__(self) -> Any:
        await self._cancelled.wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._cancelled.set()


async def test_requests_of_callers_that_cancel_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_stream, "MAX_WAITING", 3)
    made = InferStream(Stalled(), "nowhere")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await made.ask(pb.ModelInferRequest())
    assert len(made) == 0
    with pytest.raises(Overloaded):
        await made.ask(pb.ModelInferRequest())
    assert len(made) == 0
    await made.close()


async def test_a_request_that_was_never_sent_did_not_run() -> None:
    class Ending(Stalled):
        """A server that reads one request and ends the stream."""

        def ModelStreamInfer(self, requests: AsyncIterator[Any], metadata: object) -> "Stalled":
            self._requests = requests
            return self

        async def __anext__(self) -> Any:
            await anext(self._requests)
            raise StopAsyncIteration

    class Refusing(Ending):
        """A server that ends the stream while the first request is written."""

        async def __anext__(self) -> Any:
            await anext(self._requests)
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, shared_stream.NOT_WRITTEN)

        async def ModelReady(self, request: object, timeout: float) -> None:
            if self.is_stranger:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, nothing, nothing, "who are you?")

        is_stranger = False

    for server, expected in ((Ending(), [False, True, True]), (Refusing(), [True, True, True])):
        made = InferStream(server, "nowhere")
        ends = await asyncio.gather(*(made.ask(pb.ModelInferRequest()) for _ in range(3)), return_exceptions=True)
        assert [end.is_definite for end in ends if isinstance(end, Unavailable)] == expected
        await made.close()
    stranger = Refusing()
    stranger.is_stranger = True
    made = InferStream(stranger, "nowhere")
    with pytest.raises(Unauthenticated):
        await made.ask(pb.ModelInferRequest())
    await made.close()
