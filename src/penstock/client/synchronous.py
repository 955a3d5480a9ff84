"""The blocking client: unary calls, safe to use from several threads."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import grpc

from penstock.client import messages
from penstock.client.calls import Calls
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from penstock.client.options import ClientOptions, read_server
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference import grpc_service_pb2_grpc

P = ParamSpec("P")
R = TypeVar("R")


def _finish(work: Awaitable[R]) -> R:
    """What it awaits blocks this thread and never waits for an event loop: its first step is its last."""
    try:
        work.__await__().send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    raise AssertionError("a blocking call waits for an event loop")


def _blocking(call: Callable[Concatenate[Calls, P], Coroutine[Any, Any, R]]) -> "Callable[Concatenate[Client, P], R]":
    @wraps(call)
    def blocking(client: "Client", /, *args: P.args, **options: P.kwargs) -> R:
        return _finish(call(client._calls, *args, **options))

    return blocking


def _blocking_stream(
    call: Callable[Concatenate[Calls, P], AsyncGenerator[R, None]],
) -> "Callable[Concatenate[Client, P], Generator[R, None, None]]":
    @wraps(call)
    def blocking(client: "Client", /, *args: P.args, **options: P.kwargs) -> Generator[R, None, None]:
        answers = call(client._calls, *args, **options)
        try:
            while True:
                yield _finish(anext(answers))
        except StopAsyncIteration:
            return
        finally:
            _finish(answers.aclose())

    return blocking


class Client:
    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[ClientOptions],
    ) -> None:
        """`address`: HOST:PORT, or https://HOST:PORT for TLS; `timeout_s` is the deadline of every call that is given
        no other."""
        self.address = address
        server = read_server(address, options)
        self._channel = server.channels.open_blocking(server.target, messages.CHANNEL_OPTIONS)
        self._calls = _BlockingCalls(self._channel, address, timeout_s)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    embed = _blocking(Calls.embed)
    upscale = _blocking(Calls.upscale)
    score = _blocking(Calls.score)
    rerank = _blocking(Calls.rerank)
    classify = _blocking(Calls.classify)
    infer = _blocking(Calls.infer)
    infer_stream = _blocking_stream(Calls.infer_stream)
    is_ready = _blocking(Calls.is_ready)
    models = _blocking(Calls.models)
    signature = _blocking(Calls.signature)


class _BlockingCalls(Calls):
    def __init__(self, channel: grpc.Channel, address: str, timeout_s: float) -> None:
        super().__init__(address, timeout_s)
        self._stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def _send(self, method: str, message: Any, timeout_s: float) -> Any:
        return getattr(self._stub, method)(message, timeout=timeout_s)

    def _stream(
        self, message: pb.ModelInferRequest, timeout_s: float
    ) -> tuple[grpc.Call, AsyncIterator[pb.ModelStreamInferResponse]]:
        call = self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s)

        async def answers() -> AsyncIterator[pb.ModelStreamInferResponse]:
            for answer in call:
                yield answer

        return call, answers()
