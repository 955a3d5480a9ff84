"""A closed-loop load in which every request is unlike any other, and every answer is held against its request."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import grpc
import numpy as np

from benchmarks.chaos.repository import ECHO, ECHO_FLOATS
from penstock.core.tensors import pack_bytes
from penstock.experiments.load.drivers import INFER, STREAM
from penstock.pb.inference import grpc_service_pb2 as pb

DEADLINE_S = 30.0
UNORDERED = (("penstock-unordered", "1"),)


class Question(Protocol):
    def ask(self, number: int) -> pb.ModelInferRequest: ...

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool: ...


class EchoQuestion:
    def ask(self, number: int) -> pb.ModelInferRequest:
        message = pb.ModelInferRequest(model_name=ECHO, raw_input_contents=[self._data(number)])
        message.inputs.add(name="x", datatype="FP32", shape=(1, ECHO_FLOATS))
        message.outputs.add(name="y")
        return message

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool:
        return list(answer.raw_output_contents) == [self._data(number)]

    def _data(self, number: int) -> bytes:
        return (np.arange(ECHO_FLOATS, dtype=np.float32) / ECHO_FLOATS + number % 100_003).tobytes()


class EmbedQuestion:
    """Knows the right vector of each text: `learn` asks for them while all is well."""

    def __init__(self, model: str, texts: Sequence[str]) -> None:
        self._model = model
        self._texts = texts
        self._vectors: dict[int, Any] = {}

    async def learn(self, target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            call = _infer(channel)
            for number in range(len(self._texts)):
                self._vectors[number] = _vector(await call(self.ask(number), timeout=30))

    def ask(self, number: int) -> pb.ModelInferRequest:
        text = self._texts[number % len(self._texts)]
        message = pb.ModelInferRequest(model_name=self._model, raw_input_contents=[pack_bytes([text])])
        message.inputs.add(name="text", datatype="BYTES", shape=(1,))
        return message

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool:
        # Vectors are of length 1; another batch rounds otherwise, by less than any two texts differ.
        return float(_vector(answer) @ self._vectors[number % len(self._texts)]) > 0.999


@dataclass(slots=True)
class Tally:
    sent: int = 0
    answered: int = 0
    mismatched: int = 0
    duplicates: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # of one request
    longest_gap_s: float = 0.0  # in which nothing was answered
    last_answer: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> int:
        """Requests without their right answer, although their deadline had not passed."""
        return self.sent - self.answered + self.mismatched

    def answer(self, sent: float, is_right: bool) -> None:
        now = time.monotonic()
        self.answered += 1
        self.mismatched += not is_right
        self.longest_s = max(self.longest_s, now - sent)
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_answer)
        self.last_answer = now

    def details(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "answered": self.answered,
            "mismatched": self.mismatched,
            "duplicates": self.duplicates,
            "failures": dict(self.failures),
            "longest_request_s": round(self.longest_s, 3),
            "longest_gap_s": round(self.longest_gap_s, 3),
        }


class CheckedLoad:
    """Runs from entering to leaving its block; leaving waits for what is in flight.

    Some callers use unary calls. The others share one stream, on which a second answer to a request would show.
    """

    def __init__(self, target: str, questions: Sequence[Question], callers: int = 32, pause_s: float = 0.0) -> None:
        self.tally = Tally()
        self._questions = questions
        self._pause_s = pause_s  # between an answer and the caller's next request
        self._channel = grpc.aio.insecure_channel(target)
        self._unary = callers - callers // 4
        self._streamed = callers // 4
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[pb.ModelStreamInferResponse]] = {}
        self._seen: set[str] = set()
        self._writing = asyncio.Lock()  # a stream takes one write at a time
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "CheckedLoad":
        await asyncio.wait_for(self._channel.channel_ready(), 30)
        stream = self._channel.stream_stream(
            STREAM,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(metadata=UNORDERED)
        self._reader = asyncio.create_task(self._read(stream))
        callers = [self._call_forever() for _ in range(self._unary)]
        callers += [self._write_forever(stream) for _ in range(self._streamed)]
        self._tasks = [asyncio.create_task(caller) for caller in callers]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        assert self._reader is not None
        await asyncio.sleep(0.2)  # a second answer would come now
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def answered_more(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until that many further requests were answered."""
        goal = self.tally.answered + count
        async with asyncio.timeout(timeout_s):
            while self.tally.answered < goal:  # noqa: ASYNC110 - a few polls between faults
                await asyncio.sleep(0.02)

    def _next(self) -> tuple[int, Question, pb.ModelInferRequest]:
        number = next(self._numbers)
        question = self._questions[number % len(self._questions)]
        message = question.ask(number)
        message.id = f"chaos-{number}"
        self.tally.sent += 1
        return number, question, message

    async def _call_forever(self) -> None:
        call = _infer(self._channel)
        while not self._is_stopping:
            number, question, message = self._next()
            sent = time.monotonic()
            try:
                answer = await call(message, timeout=DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                self.tally.failures[f"{error.code().name}: {error.details()}"] += 1
                await asyncio.sleep(0.05)
                continue
            self.tally.answer(sent, answer.id == message.id and question.is_answer(number, answer))
            await asyncio.sleep(self._pause_s)

    async def _write_forever(self, stream: Any) -> None:
        while not self._is_stopping:
            number, question, message = self._next()
            future = self._pending[message.id] = asyncio.get_running_loop().create_future()
            sent = time.monotonic()
            try:
                async with self._writing:
                    await stream.write(message)
                answer = await asyncio.wait_for(future, DEADLINE_S)
            except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
                self.tally.failures[f"stream: {type(error).__name__}"] += 1
                return
            finally:
                del self._pending[message.id]
            if answer.error_message:
                self.tally.failures[f"stream: {answer.error_message}"] += 1
                continue
            self.tally.answer(sent, question.is_answer(number, answer.infer_response))
            await asyncio.sleep(self._pause_s)

    async def _read(self, stream: Any) -> None:
        async for answer in stream:
            identity = answer.infer_response.id
            self.tally.duplicates += identity in self._seen
            self._seen.add(identity)
            future = self._pending.get(identity)
            if future is not None and not future.done():
                future.set_result(answer)


def _infer(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(
        INFER,
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelInferResponse.FromString,
    )


def _vector(answer: pb.ModelInferResponse) -> Any:
    return np.frombuffer(answer.raw_output_contents[0], dtype=np.float32)
