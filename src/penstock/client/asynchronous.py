"""The client for an event loop. Its requests share a few streams, which return each answer as soon as it is ready."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine
from functools import partial
from itertools import cycle
from typing import Any, Literal, TypeVar, Unpack, overload

import grpc

from penstock.client import faults
from penstock.client.calls import Ask, Calls
from penstock.client.client_options import ClientOptions, read_server
from penstock.client.connection import Connection
from penstock.client.direct import CHECK_TIMEOUT_S, SILENCE_S, WorkerRoute
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, OWN_CHANNEL_OPTIONS
from penstock.client.ordered_results import map_in_order
from penstock.client.shared_stream import InferStream
from penstock.client.tasks import ImageOptions
from penstock.client.text_generation import (
    AnswerOptions,
    Generated,
    Messages,
    Prompt,
    TextDelta,
    make_chat_request,
    make_prompt_request,
)
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels, make_bearer_header

# Each stream has its own connection, so that several gateways on one port share the requests.
STREAMS = 4
# A larger request is sent as a separate call: on a stream it would delay other requests, and if it exceeded the
# server's limit, the whole stream would end.
MAX_STREAMED_BYTES = 512 * 1024
T = TypeVar("T")
R = TypeVar("R")


class AsyncClient(Calls):
    """A Penstock client for use from one event loop.

    If you cancel a call, its answer is ignored, but the server may work on the request until the deadline.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        streams: int = STREAMS,
        **options: Unpack[ClientOptions],
    ) -> None:
        """Prepare a client; connections open with the first calls.

        `address` is HOST:PORT, or https://HOST:PORT for TLS. `timeout_s` is the deadline of calls without a
        `timeout_s` of their own. `streams` is the number of connections that the requests share.
        """
        server = read_server(address, options)
        super().__init__(server, address, timeout_s, options, max(1, streams))
        self._streams: list[InferStream | None] = [None] * len(self._connections)
        self._turns = cycle(range(len(self._connections)))
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def upscale_stream(
        self,
        images: AsyncIterable[bytes],
        model: str = "srcnn",
        window: int = 8,
        timeout_s: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> AsyncGenerator[bytes, None]:
        """Yield the upscaled images in the order of `images`.

        At most `window` images are being processed or wait to be read by the caller.
        """
        return map_in_order(images, partial(self.upscale, model=model, timeout_s=timeout_s, **options), window)

    @overload
    def chat(
        self, model: str, messages: Messages, *, stream: Literal[True], **options: Unpack[AnswerOptions]
    ) -> AsyncGenerator[TextDelta, None]: ...

    @overload
    def chat(
        self, model: str, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> Coroutine[Any, Any, Generated]: ...

    def chat(
        self, model: str, messages: Messages, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> Coroutine[Any, Any, Generated] | AsyncGenerator[TextDelta, None]:
        """Return the model's answer to a chat, or with `stream=True` an iterator over its parts as they are generated.

        Close the iterator to cancel the rest of the answer.
        """
        asked = make_chat_request(model, messages, options)
        return self._generate_stream(asked) if stream else self._generate(asked)

    @overload
    def generate(
        self, model: str, prompt: Prompt, *, stream: Literal[True], **options: Unpack[AnswerOptions]
    ) -> AsyncGenerator[TextDelta, None]: ...

    @overload
    def generate(
        self, model: str, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> Coroutine[Any, Any, Generated]: ...

    def generate(
        self, model: str, prompt: Prompt, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> Coroutine[Any, Any, Generated] | AsyncGenerator[TextDelta, None]:
        """Complete a raw prompt, without a chat template; otherwise like `chat`."""
        asked = make_prompt_request(model, prompt, options)
        return self._generate_stream(asked) if stream else self._generate(asked)

    async def close(self) -> None:
        for stream in self._streams:
            if stream is not None:
                await stream.close()
        for task in self._background:
            task.cancel()
        for connection in (*self._connections, *self._workers.values()):
            await connection.channel.close()

    def _open(self, channels: Channels, address: str) -> Connection:
        return Connection(channels.open(address, OWN_CHANNEL_OPTIONS))

    def _replace(self, index: int, connection: Connection) -> None:
        if self._connections[index] is not connection:
            return
        super()._replace(index, connection)
        stream, self._streams[index] = self._streams[index], None

        async def close() -> None:
            await connection.channel.close(grace=self._timeout_s)
            if stream is not None:
                await stream.close()

        self._start_task(close())

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _map_in_order(
        self, items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
    ) -> AsyncGenerator[R, None]:
        return map_in_order(items, work, window)

    def _make_gateway_attempt(self, message: pb.ModelInferRequest) -> Ask[pb.ModelInferResponse]:
        if sum(map(len, message.raw_input_contents)) > MAX_STREAMED_BYTES:
            return super()._make_gateway_attempt(message)
        has_timeout = "timeout" in message.parameters
        is_sent = False

        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            nonlocal is_sent
            sent = message
            if is_sent:  # copy the message, because the previous attempt's message may still be in the send queue
                sent = pb.ModelInferRequest()
                sent.CopyFrom(message)
            is_sent = True
            # A stream has no deadline, so each request carries its remaining time, in microseconds.
            if not has_timeout:
                sent.parameters["timeout"].int64_param = max(1, int(timeout_s * 1e6))
            index, started = self._find_least_busy(), time.monotonic()
            connection, stream = self._connections[index], self._streams[index]
            assert stream is not None, "it was just opened"
            try:
                async with asyncio.timeout(timeout_s):
                    return await stream.ask(sent)
            except TimeoutError:
                if max(stream.answered_at, connection.answered_at) < started:
                    self._replace(index, connection)
                raise faults.make_timeout_error() from None

        return ask

    async def _ask_worker(
        self, route: WorkerRoute, message: pb.ModelInferRequest, timeout_s: float
    ) -> pb.ModelInferResponse:
        worker = self._get_worker_connection(route).stub
        call = worker.ModelInfer(message, timeout=timeout_s, metadata=make_bearer_header(route.token))
        is_silent = False

        async def check() -> None:
            nonlocal is_silent
            while True:
                try:
                    await worker.ServerLive(pb.ServerLiveRequest(), timeout=CHECK_TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    is_silent = True
                    # The connection is not closed here: it stays open until the calls that use it have ended.
                    self._workers.pop((route.address, route.is_tls), None)
                    call.cancel()
                    return
                await asyncio.sleep(SILENCE_S)

        def start_checks() -> None:
            checking = self._start_task(check())
            call.add_done_callback(lambda _: checking.cancel())

        timer = asyncio.get_running_loop().call_later(SILENCE_S, start_checks)
        try:
            return await call  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            if is_silent:
                raise faults.make_unresponsive_error(route.address) from None
            raise
        finally:
            timer.cancel()

    def _make_hedged_attempt(self, message: pb.ModelInferRequest, after_s: float) -> Ask[pb.ModelInferResponse]:
        attempt = self._make_gateway_attempt(message)

        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            asked = {asyncio.ensure_future(attempt(timeout_s))}
            try:
                done, waiting = await asyncio.wait(asked, timeout=after_s)
                if not done and after_s < timeout_s and self._budget.take():
                    waiting.add(asyncio.ensure_future(attempt(timeout_s - after_s)))
                    asked |= waiting
                while waiting and not any(each.exception() is None for each in done):
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                return min(done, key=lambda each: each.exception() is not None).result()
            finally:
                for each in asked:
                    each.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

        return ask

    def _find_least_busy(self) -> int:
        """Return the index of the stream with the fewest waiting requests; open or reopen streams as needed."""
        best, least = 0, -1
        for index, stream in enumerate(self._streams):
            if stream is None or stream.is_closed:
                if least == 0:
                    continue
                stream = self._streams[index] = InferStream(self._connections[index].stub, self.address)
            if least < 0 or len(stream) < least:
                best, least = index, len(stream)
        return best

    def _get_stream_connection(self) -> Connection:
        """Return a connection for a streamed answer, round robin.

        A streamed answer has its own stream, so that a slow reader does not delay other requests.
        """
        return self._connections[next(self._turns)]

    async def _answer(self, call: Any) -> Any:
        return await call

    def _iterate_answers(self, call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        return aiter(call)
