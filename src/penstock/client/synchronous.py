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
from penstock.client.client_options import ClientOptions, ServerAddress, read_server
from penstock.client.connection import Connection, WorkerWatch
from penstock.client.direct import WorkerRoute
from penstock.client.messages import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from penstock.client.ordered_results import check_window
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

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def _run_blocking(work: Awaitable[R]) -> R:
    """Run a coroutine without an event loop; every call that the coroutine awaits must block this thread."""
    try:
        work.__await__().send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    raise AssertionError("a blocking call must not wait for an event loop")


def _make_blocking(
    call: Callable[Concatenate[Calls, P], Coroutine[Any, Any, R]],
) -> "Callable[Concatenate[Client, P], R]":
    @wraps(call)
    def blocking(client: "Client", /, *args: P.args, **options: P.kwargs) -> R:
        return _run_blocking(call(client._calls, *args, **options))

    return blocking


def _make_blocking_stream(
    call: Callable[Concatenate[Calls, P], AsyncGenerator[R, None]],
) -> "Callable[Concatenate[Client, P], Generator[R, None, None]]":
    @wraps(call)
    def blocking(client: "Client", /, *args: P.args, **options: P.kwargs) -> Generator[R, None, None]:
        answers = call(client._calls, *args, **options)
        try:
            while True:
                yield _run_blocking(anext(answers))
        except StopAsyncIteration:
            return
        finally:
            _run_blocking(answers.aclose())

    return blocking


class Client:
    """A Penstock client whose calls block; it is safe to use from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[ClientOptions],
    ) -> None:
        """Prepare a client; the connection opens with the first call.

        `address` is HOST:PORT, or https://HOST:PORT for TLS. `timeout_s` is the deadline of calls without a
        `timeout_s` of their own.
        """
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
        """Return the model's answer to a chat, or with `stream=True` an iterator over its parts as they are generated.

        Close the iterator to cancel the rest of the answer.
        """
        asked = make_chat_request(model, messages, options)
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
        """Complete a raw prompt, without a chat template; otherwise like `chat`."""
        asked = make_prompt_request(model, prompt, options)
        return self._generate_stream(asked) if stream else self._generate(asked)

    embed = _make_blocking(Calls.embed)
    embed_many = _make_blocking_stream(Calls.embed_many)
    upscale = _make_blocking(Calls.upscale)
    score = _make_blocking(Calls.score)
    rerank = _make_blocking(Calls.rerank)
    classify = _make_blocking(Calls.classify)
    infer = _make_blocking(Calls.infer)
    infer_stream = _make_blocking_stream(Calls.infer_stream)
    _generate = _make_blocking(Calls._generate)
    _generate_stream = _make_blocking_stream(Calls._generate_stream)
    is_ready = _make_blocking(Calls.is_ready)
    models = _make_blocking(Calls.models)
    signature = _make_blocking(Calls.signature)


class _BlockingCalls(Calls):
    def __init__(self, server: ServerAddress, address: str, timeout_s: float, options: ClientOptions) -> None:
        # Hedged requests use a second connection.
        super().__init__(server, address, timeout_s, options, 1 if options.get("hedge_after_s") is None else 2)
        self._watch = WorkerWatch(self._drop_worker)

    def close(self) -> None:
        self._watch.close()
        for connection in (*self._connections, *self._workers.values()):
            connection.channel.close()

    def _open(self, channels: Channels, address: str) -> Connection:
        return Connection(channels.open_blocking(address, messages.OWN_CHANNEL_OPTIONS))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop in this thread

    def _drop_worker(self, connection: Connection) -> None:
        self._workers = {route: each for route, each in self._workers.items() if each is not connection}
        connection.channel.close()

    async def _ask_worker(
        self, route: WorkerRoute, message: pb.ModelInferRequest, timeout_s: float
    ) -> pb.ModelInferResponse:
        worker = self._get_worker_connection(route)
        with self._watch.watch(worker):
            try:
                answer = worker.stub.ModelInfer(message, timeout=timeout_s, metadata=make_bearer_header(route.token))
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
                if worker.is_abandoned:
                    raise faults.make_unresponsive_error(route.address) from error
                raise
        return answer  # type: ignore[no-any-return]

    def _make_hedged_attempt(self, message: pb.ModelInferRequest, after_s: float) -> Ask[pb.ModelInferResponse]:
        async def ask(timeout_s: float) -> pb.ModelInferResponse:
            started = time.monotonic()
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
                        send(self._connections[1].stub, max(0.001, timeout_s - (time.monotonic() - started)))
                    done = answered.get()
                if done.exception() is not None and len(asked) > 1:
                    done = answered.get()
                return done.result()  # type: ignore[no-any-return]
            finally:
                for call in asked:
                    call.cancel()

        return ask

    async def _map_in_order(
        self, items: AsyncIterable[T], work: Callable[[T], Coroutine[Any, Any, R]], window: int
    ) -> AsyncGenerator[R, None]:
        check_window(window)
        waiting: deque[Future[R]] = deque()
        pool = ThreadPoolExecutor(window, "penstock-client")
        try:
            async for item in items:
                waiting.append(pool.submit(lambda item: _run_blocking(work(item)), item))
                while waiting and (len(waiting) >= window or waiting[0].done()):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, call: Any) -> Any:
        return call

    async def _iterate_answers(self, call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for answer in call:
            yield answer
