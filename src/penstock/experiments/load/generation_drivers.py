"""Drivers that send requests for generated text and receive tokens, over gRPC or OpenAI's REST API."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import orjson

from penstock.experiments.load.drivers import INFER, HttpConnection, Rejected, RestDriver, StreamDriver, UnaryDriver
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels

ANSWER_S = 300.0  # timeout of an answer
_USAGE = struct.Struct("<3i")
Usage = tuple[int, int]  # tokens of the prompt and of the answer
OnTokens = Callable[[int], None]  # called with the number of tokens that arrived together


class TextDriver(Protocol):
    async def open(self, concurrency: int) -> None: ...

    async def call(self, slot: int, number: int, on_tokens: OnTokens) -> Usage | None:
        """Send request `number`, call `on_tokens` when tokens arrive, and return the complete answer's token usage.

        The usage is None if the server does not count tokens. Raise `Rejected` if the server answers with an error.
        """
        ...

    async def close(self) -> None: ...


class WholeDriver(UnaryDriver):
    """Sends unary gRPC requests, whose answers contain the whole text."""

    def __init__(self, target: str, messages: list[bytes], channels: Channels) -> None:
        super().__init__(target, messages, INFER, channels)
        self._call = self._channel.unary_unary(INFER, response_deserializer=pb.ModelInferResponse.FromString)

    async def call(self, slot: int, number: int, on_tokens: OnTokens) -> Usage | None:  # type: ignore[override]
        try:
            answer = await self._call(self._messages[number % len(self._messages)], timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise Rejected(error.code().name) from None
        return _read_usage(answer)


class StreamedAnswer:
    """Receives one answer whose tokens arrive on a stream."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.on_tokens = on_tokens
        self.tokens = 0
        self.usage: Usage | None = None
        self.ended: asyncio.Future[Usage | None] = asyncio.get_running_loop().create_future()

    def receive(self, message: pb.ModelInferResponse) -> None:
        self.usage = usage = _read_usage(message) or self.usage
        new = usage[1] - self.tokens if usage is not None else bool(message.outputs)
        if new > 0:
            self.tokens += new
            self.on_tokens(new)
        if not self.ended.done() and message.parameters["triton_final_response"].bool_param:
            self.ended.set_result(usage or (0, self.tokens))

    def fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(Rejected(reason))


class DeltaDriver(StreamDriver):
    """Sends requests over bidirectional gRPC streams, one per caller up to `most`; a request has many responses."""

    most = 64

    def __init__(self, target: str, messages: list[bytes], channels: Channels) -> None:
        super().__init__(target, messages, channels)
        self._answers: dict[str, StreamedAnswer] = {}

    async def call(self, slot: int, number: int, on_tokens: OnTokens) -> Usage | None:  # type: ignore[override]
        identity = str(number)
        answer = self._answers[identity] = StreamedAnswer(on_tokens)
        message = pb.ModelInferRequest.FromString(self._messages[number % len(self._messages)])
        message.id = identity
        message.parameters["triton_enable_empty_final_response"].bool_param = True  # marks the end of the answer
        self._outboxes[slot % len(self._outboxes)].put_nowait(message.SerializeToString())
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer.ended
        except TimeoutError:
            raise Rejected("timeout") from None
        finally:
            del self._answers[identity]

    async def _read(self, call: Any) -> None:
        try:
            async for message in call:
                found = message.infer_response
                answer = self._answers.get(found.id)
                if answer is None:
                    continue
                if message.error_message:
                    answer.fail(found.parameters["penstock-code"].string_param or message.error_message)
                else:
                    answer.receive(found)
        except grpc.aio.AioRpcError as error:
            # Answers do not record their stream, so all waiting answers fail.
            for answer in list(self._answers.values()):
                answer.fail(error.code().name)


class CompletionsDriver(RestDriver):
    """Sends requests to OpenAI's completions API; an answer is a stream of events, or one JSON document.

    A piece of text counts as one token when it arrives; the server's usage corrects the number at the end.
    """

    def __init__(self, target: str, messages: list[bytes], context: Any, is_streamed: bool) -> None:
        super().__init__(target, messages, context)
        self._is_streamed = is_streamed

    def _make(self) -> "_EventConnection":
        return _EventConnection()

    async def call(self, slot: int, number: int, on_tokens: OnTokens) -> Usage | None:  # type: ignore[override]
        async with self._permits:
            connection = await self._take()
            assert isinstance(connection, _EventConnection)
            events = connection.listen(on_tokens if self._is_streamed else None)
            status = await connection.request(self._messages[number % len(self._messages)])
            self._give(connection)
        if status != 200:
            raise Rejected(str(status))
        if events.failure:
            raise Rejected(events.failure)
        return events.usage


class _EventConnection(HttpConnection):
    timeout_s = ANSWER_S

    def listen(self, on_tokens: OnTokens | None) -> "CompletionEvents":
        self._events = CompletionEvents(on_tokens)
        return self._events

    def on_body(self, data: bytes) -> None:
        self._events.feed(data)

    def on_message_complete(self) -> None:
        self._events.end()
        super().on_message_complete()


class CompletionEvents:
    """Parses an answer's body: server-sent events, or one JSON document if `on_tokens` is None."""

    def __init__(self, on_tokens: OnTokens | None) -> None:
        self._on_tokens = on_tokens
        self._rest = b""
        self.usage: Usage | None = None
        self.failure = ""

    def feed(self, data: bytes) -> None:
        self._rest += data
        if self._on_tokens is None:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            self._handle_event(event.removeprefix(b"data:").strip())

    def end(self) -> None:
        if self._on_tokens is None or self._rest.startswith(b"{"):
            self._handle_event(self._rest)

    def _handle_event(self, text: bytes) -> None:
        if not text.startswith(b"{"):
            return  # the end marker or a comment
        try:
            found = orjson.loads(text)
        except ValueError:
            self.failure = "invalid JSON"
            return
        if error := found.get("error"):
            self.failure = str(error.get("code") or error.get("type")) if isinstance(error, dict) else str(error)
        if usage := found.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        if self._on_tokens is not None and any(map(_has_text, found.get("choices", ()))):
            self._on_tokens(1)


def _has_text(choice: dict[str, Any]) -> bool:
    """Return True if one of the choices in a completion's or a chat's message has text."""
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


def _read_usage(message: pb.ModelInferResponse) -> Usage | None:
    for output, data in zip(message.outputs, message.raw_output_contents, strict=False):
        if output.name == "usage" and len(data) == _USAGE.size:
            prompt, generated, _ = _USAGE.unpack(data)
            return prompt, generated
    return None
