"""How a request for text travels from the load generator, and how its tokens come back: gRPC, or OpenAI's REST."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import orjson

from penstock.experiments.load.drivers import INFER, HttpConnection, Rejected, RestDriver, StreamDriver, UnaryDriver
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.wire.channels import Channels

ANSWER_S = 300.0  # what an answer may take
_USAGE = struct.Struct("<3i")
Usage = tuple[int, int]  # tokens of the prompt, and of the answer
Heard = Callable[[int], None]  # so many tokens came together


class TextDriver(Protocol):
    async def open(self, concurrency: int) -> None: ...

    async def call(self, slot: int, number: int, heard: Heard) -> Usage | None:
        """Sends request `number`, and tells of tokens as they come; returns when the answer has ended.

        Raises Rejected. None: the server does not count tokens.
        """
        ...

    async def close(self) -> None: ...


class WholeDriver(UnaryDriver):
    """Unary gRPC: an answer comes whole."""

    def __init__(self, target: str, messages: list[bytes], channels: Channels) -> None:
        super().__init__(target, messages, INFER, channels)
        self._call = self._channel.unary_unary(INFER, response_deserializer=pb.ModelInferResponse.FromString)

    async def call(self, slot: int, number: int, heard: Heard) -> Usage | None:  # type: ignore[override]
        try:
            answer = await self._call(self._messages[number % len(self._messages)], timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise Rejected(error.code().name) from None
        return _usage_of(answer)


class StreamedAnswer:
    """One on a stream."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.tokens = 0
        self.told: Usage | None = None
        self.ended: asyncio.Future[Usage | None] = asyncio.get_running_loop().create_future()

    def came(self, message: pb.ModelInferResponse) -> None:
        self.told = told = _usage_of(message) or self.told
        new = told[1] - self.tokens if told is not None else bool(message.outputs)
        if new > 0:
            self.tokens += new
            self.heard(new)
        if not self.ended.done() and message.parameters["triton_final_response"].bool_param:
            self.ended.set_result(told or (0, self.tokens))

    def fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(Rejected(reason))


class DeltaDriver(StreamDriver):
    """A stream for each caller up to a number; a request has many answers."""

    most = 64

    def __init__(self, target: str, messages: list[bytes], channels: Channels) -> None:
        super().__init__(target, messages, channels)
        self._answers: dict[str, StreamedAnswer] = {}

    async def call(self, slot: int, number: int, heard: Heard) -> Usage | None:  # type: ignore[override]
        identity = str(number)
        answer = self._answers[identity] = StreamedAnswer(heard)
        message = pb.ModelInferRequest.FromString(self._messages[number % len(self._messages)])
        message.id = identity
        message.parameters["triton_enable_empty_final_response"].bool_param = True  # so that each has an end
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
                    answer.came(found)
        except grpc.aio.AioRpcError as error:
            # What else was on this stream is not known apart: all that waits ends with it.
            for answer in list(self._answers.values()):
                answer.fail(error.code().name)


class CompletionsDriver(RestDriver):
    """OpenAI's completions over kept HTTP connections: server-sent events, or an answer that comes whole.

    A piece of text counts as one token as it comes; how many there were the server says at the end.
    """

    def __init__(self, target: str, messages: list[bytes], context: Any, is_streamed: bool) -> None:
        super().__init__(target, messages, context)
        self._is_streamed = is_streamed

    def _make(self) -> "_EventConnection":
        return _EventConnection()

    async def call(self, slot: int, number: int, heard: Heard) -> Usage | None:  # type: ignore[override]
        async with self._permits:
            connection = await self._take()
            assert isinstance(connection, _EventConnection)
            events = connection.listen(heard if self._is_streamed else None)
            status = await connection.request(self._messages[number % len(self._messages)])
            self._give(connection)
        if status != 200:
            raise Rejected(str(status))
        if events.failure:
            raise Rejected(events.failure)
        return events.usage


class _EventConnection(HttpConnection):
    timeout_s = ANSWER_S

    def listen(self, heard: Heard | None) -> "CompletionEvents":
        self._events = CompletionEvents(heard)
        return self._events

    def on_body(self, data: bytes) -> None:
        self._events.feed(data)

    def on_message_complete(self) -> None:
        self._events.end()
        super().on_message_complete()


class CompletionEvents:
    """The body of an answer: events as they come, or one JSON document where `heard` is none."""

    def __init__(self, heard: Heard | None) -> None:
        self._heard = heard
        self._rest = b""
        self.usage: Usage | None = None
        self.failure = ""

    def feed(self, data: bytes) -> None:
        self._rest += data
        if self._heard is None:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            self._take(event.removeprefix(b"data:").strip())

    def end(self) -> None:
        if self._heard is None or self._rest.startswith(b"{"):
            self._take(self._rest)

    def _take(self, text: bytes) -> None:
        if not text.startswith(b"{"):
            return  # the end, or a comment
        try:
            found = orjson.loads(text)
        except ValueError:
            self.failure = "no JSON"
            return
        if error := found.get("error"):
            self.failure = str(error.get("code") or error.get("type")) if isinstance(error, dict) else str(error)
        if usage := found.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        if self._heard is not None and any(map(_has_text, found.get("choices", ()))):
            self._heard(1)


def _has_text(choice: dict[str, Any]) -> bool:
    """Of a completion, or of a chat's."""
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


def _usage_of(message: pb.ModelInferResponse) -> Usage | None:
    for output, data in zip(message.outputs, message.raw_output_contents, strict=False):
        if output.name == "usage" and len(data) == _USAGE.size:
            prompt, generated, _ = _USAGE.unpack(data)
            return prompt, generated
    return None
