"""The client for an event loop: requests share a few streams, and answers come as they are done."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine
from functools import partial
from itertools import cycle
from typing import Any, Literal, TypeVar, Unpack, overload

import grpc

from penstock.client import faults
from penstock.client.calls import Ask, Calls
from penstock.client.connection import Connection
from penstock.client.direct import CHECK_S, PROBE_S, WorkerWay
from penstock.client.generation import (
    AnswerOptions,
    Generated,
    Messages,
    Prompt,
    TextDelta,
    ask_chat,
    ask_prompt,
)
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, OWN_CHANNEL_OPTIONS
from penstock.client.options import ClientOptions, read_server
from penstock.client.ordered import in_order
from penstock.client.stream import InferStream
from penstock.client.tasks import ImageOptions
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels, bearer

# Each stream is a connection of its own: several gateways on one port then share the requests.
STREAMS = 4
# A larger request goes alone: it would hold up its stream, and one over the server's limit would end it for all.
MAX_STREAMED_BYTES = 512 * 1024
T = TypeVar("T")
R = TypeVar("R")


class AsyncClient(Calls):
    """Used from one event loop. A call that is given up is not heard; the server drops it at its deadline."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        streams: int = STREAMS,
        **options: Unpack[ClientOptions],
    ) -> None:
        """`address`: HOST:PORT, or https://HOST:PORT for TLS; `timeout_s` is the deadline of every call that is given
        no other."""
        server = read_server(address, options)
        super().__init__(server, address, timeout_s, options, max(1, streams))
        self._streams: list[InferStream | None] = [None] * len(self._connections)
        self._turns = cycle(range(len(self._connections)))
        self._tasks_beside: set[asyncio.Task[None]] = set()

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
        """Upscaled images in the order of `images`, with at most `window` on their way, or done and not taken."""
        return in_order(images, partial(self.upscale, model=model, timeout_s=timeout_s, **options), window)

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
        """The answer to a chat, or with `stream` what comes of it as it comes: closing that cancels the rest."""
        asked = ask_chat(model, messages, options)
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
        """How the model goes on from a prompt; otherwise as `chat`."""
        asked = ask_prompt(model, prompt, options)
        return self._generate_stream(asked) if stream else self._generate(asked)

    async def close(self) -> None:
        for stream in self._streams:
            if stream is not None:
                await stream.close()
        for task in self._tasks_beside:
            task.cancel()
        for connection in (*self._connections, *self._workers.values()):
            await connection.channel.close()

    def _open(self, channels: Channels, address: str) -> Connection:
        return Connection(channels.open(address, OWN_CHANNEL_OPTIONS))

    def _leave(self, index: int, connection: Connection) -> None:
        if self._connections[index] is not connection:
            return
        super()._leave(index, connection)
        stream, self._streams[index] = self._streams[index], None

        async def close() -> None:
            await connection.channel.close(grace=self._timeout_s)
            if stream is not None:
                await stream.close()

        self._beside(close())

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks_beside.add(task)
        task.add_done_callback(self._tasks_beside.discard)
        return task

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _each(
        self, items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
    ) -> AsyncGenerator[R, None]:
        return in_order(items, work, window)

    def _asking(self, message: pb.ModelInferRequest) -> Ask[pb.ModelInferResponse]:
        if sum(map(len, message.raw_input_contents)) > MAX_STREAMED_BYTES:
            return super()._asking(message)
        has_timeout = "timeout" in message.parameters
        is_sent = False

        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            nonlocal is_sent
            sent = message
            if is_sent:  # what was given up may still be in line
                sent = pb.ModelInferRequest()
                sent.CopyFrom(message)
            is_sent = True
            # A stream has no deadline of its own: each request carries what it has left, in microseconds.
            if not has_timeout:
                sent.parameters["timeout"].int64_param = max(1, int(timeout_s * 1e6))
            index, began = self._least_busy(), time.monotonic()
            connection, stream = self._connections[index], self._streams[index]
            assert stream is not None, "it was just opened"
            try:
                async with asyncio.timeout(timeout_s):
                    return await stream.ask(sent)
            except TimeoutError:
                if max(stream.heard_at, connection.heard_at) < began:
                    self._leave(index, connection)
                raise faults.late() from None

        return ask

    async def _ask_worker(
        self, way: WorkerWay, message: pb.ModelInferRequest, timeout_s: float
    ) -> pb.ModelInferResponse:
        worker = self._worker(way).stub
        call = worker.ModelInfer(message, timeout=timeout_s, metadata=bearer(way.token))
        is_silent = False

        async def check() -> None:
            nonlocal is_silent
            while True:
                try:
                    await worker.ServerLive(pb.ServerLiveRequest(), timeout=PROBE_S)
                except grpc.aio.AioRpcError:
                    is_silent = True
                    self._workers.pop((way.address, way.is_tls), None)  # what is open is left with its calls
                    call.cancel()
                    return
                await asyncio.sleep(CHECK_S)

        def begin() -> None:
            checking = self._beside(check())
            call.add_done_callback(lambda _: checking.cancel())

        timer = asyncio.get_running_loop().call_later(CHECK_S, begin)
        try:
            return await call  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            if is_silent:
                raise faults.silent(way.address) from None
            raise
        finally:
            timer.cancel()

    def _hedging(self, message: pb.ModelInferRequest, after_s: float) -> Ask[pb.ModelInferResponse]:
        attempt = self._asking(message)

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

    def _least_busy(self) -> int:
        """Its stream's place. Streams open when they are needed, and anew when they have ended."""
        best, least = 0, -1
        for index, stream in enumerate(self._streams):
            if stream is None or stream.is_closed:
                if least == 0:
                    continue
                stream = self._streams[index] = InferStream(self._connections[index].stub, self.address)
            if least < 0 or len(stream) < least:
                best, least = index, len(stream)
        return best

    def _for_stream(self) -> Connection:
        """On a shared stream, who takes answers slowly would hold up the others: each has its own, in turn."""
        return self._connections[next(self._turns)]

    async def _answer(self, call: Any) -> Any:
        return await call

    def _answers(self, call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        return aiter(call)
