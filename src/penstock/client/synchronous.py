"""The blocking client: unary calls, safe to use from several threads."""

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

import grpc

from penstock.client import faults, messages
from penstock.client.calls import Ask, Calls
from penstock.client.connection import Connection
from penstock.client.direct import WorkerWay
from penstock.client.generation import (
    AnswerOptions,
    Generated,
    Messages,
    Prompt,
    TextDelta,
    ask_chat,
    ask_prompt,
)
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from penstock.client.options import ClientOptions, ServerAddress, read_server
from penstock.client.ordered import check_window
from penstock.client.watching import WorkerWatch
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels, bearer

P = ParamSpec("P")
T = TypeVar("T")
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
        self._calls = _BlockingCalls(read_server(address, options), address, timeout_s, options)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._calls.close()

    @overload
    def chat(
        self, model: str, messages: Messages, *, stream: Literal[True], **options: Unpack[AnswerOptions]
    ) -> Generator[TextDelta, None, None]: ...

    @overload
    def chat(
        self, model: str, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> Generated: ...

    def chat(
        self, model: str, messages: Messages, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> Generated | Generator[TextDelta, None, None]:
        """The answer to a chat, or with `stream` what comes of it as it comes: closing that cancels the rest."""
        asked = ask_chat(model, messages, options)
        return self._generate_stream(asked) if stream else self._generate(asked)

    @overload
    def generate(
        self, model: str, prompt: Prompt, *, stream: Literal[True], **options: Unpack[AnswerOptions]
    ) -> Generator[TextDelta, None, None]: ...

    @overload
    def generate(
        self, model: str, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> Generated: ...

    def generate(
        self, model: str, prompt: Prompt, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> Generated | Generator[TextDelta, None, None]:
        """How the model goes on from a prompt; otherwise as `chat`."""
        asked = ask_prompt(model, prompt, options)
        return self._generate_stream(asked) if stream else self._generate(asked)

    embed = _blocking(Calls.embed)
    embed_many = _blocking_stream(Calls.embed_many)
    upscale = _blocking(Calls.upscale)
    score = _blocking(Calls.score)
    rerank = _blocking(Calls.rerank)
    classify = _blocking(Calls.classify)
    infer = _blocking(Calls.infer)
    infer_stream = _blocking_stream(Calls.infer_stream)
    _generate = _blocking(Calls._generate)
    _generate_stream = _blocking_stream(Calls._generate_stream)
    is_ready = _blocking(Calls.is_ready)
    models = _blocking(Calls.models)
    signature = _blocking(Calls.signature)


class _BlockingCalls(Calls):
    def __init__(self, server: ServerAddress, address: str, timeout_s: float, options: ClientOptions) -> None:
        # What is asked for again goes by a connection of its own.
        super().__init__(server, address, timeout_s, options, 1 if options.get("hedge_after_s") is None else 2)
        self._watch = WorkerWatch(self._leave_worker)

    def close(self) -> None:
        self._watch.close()
        for connection in (*self._connections, *self._workers.values()):
            connection.channel.close()

    def _open(self, channels: Channels, address: str) -> Connection:
        return Connection(channels.open_blocking(address, messages.OWN_CHANNEL_OPTIONS))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this thread waits for nothing else

    def _leave_worker(self, connection: Connection) -> None:
        self._workers = {way: each for way, each in self._workers.items() if each is not connection}
        connection.channel.close()

    async def _ask_worker(
        self, way: WorkerWay, message: pb.ModelInferRequest, timeout_s: float
    ) -> pb.ModelInferResponse:
        worker = self._worker(way)
        with self._watch.over(worker):
            try:
                answer = worker.stub.ModelInfer(message, timeout=timeout_s, metadata=bearer(way.token))
            except (grpc.RpcError, ValueError) as error:  # the second: it is closed
                if worker.is_left:
                    raise faults.silent(way.address) from error
                raise
        return answer  # type: ignore[no-any-return]

    def _hedging(self, message: pb.ModelInferRequest, after_s: float) -> Ask[pb.ModelInferResponse]:
        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            began = time.monotonic()
            answered: SimpleQueue[Any] = SimpleQueue()
            asked: list[Any] = []

            def send(stub: Any, left_s: float) -> None:
                asked.append(stub.ModelInfer.future(message, timeout=left_s))
                asked[-1].add_done_callback(answered.put)

            try:
                send(self._connections[0].stub, timeout_s)
                try:
                    done = answered.get(timeout=after_s)
                except Empty:
                    if self._budget.take():
                        send(self._connections[1].stub, max(0.001, timeout_s - (time.monotonic() - began)))
                    done = answered.get()
                if done.exception() is not None and len(asked) > 1:
                    done = answered.get()
                return done.result()  # type: ignore[no-any-return]
            finally:
                for call in asked:
                    call.cancel()

        return ask

    async def _each(
        self, items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
    ) -> AsyncGenerator[R, None]:
        check_window(window)
        waiting: deque[Future[R]] = deque()
        pool = ThreadPoolExecutor(window, "penstock-client")
        try:
            async for item in items:
                waiting.append(pool.submit(lambda item: _finish(work(item)), item))
                while waiting and (len(waiting) >= window or waiting[0].done()):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, call: Any) -> Any:
        return call

    async def _answers(self, call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for answer in call:
            yield answer
