"""A closed-loop load in which every request is unique, and every answer is compared with its request."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np

from benchmarks.waiting import until
from penstock.pb.inference import grpc_service_pb2 as pb
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.calls import make_infer_request, make_text_request
from tests.chaos.repository import ECHO, ECHO_FLOATS
from tests.chaos.unordered import UnorderedStream

DEADLINE_S = 30.0


class Question(Protocol):
    def ask(self, number: int) -> pb.ModelInferRequest: ...

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool: ...


class EchoQuestion:
    def __init__(self, model: str = ECHO) -> None:
        self._model = model

    def ask(self, number: int) -> pb.ModelInferRequest:
        return make_infer_request(self._model, ("x", "FP32", (1, ECHO_FLOATS), self._data(number)), output="y")

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool:
        return list(answer.raw_output_contents) == [self._data(number)]

    def _data(self, number: int) -> bytes:
        return (np.arange(ECHO_FLOATS, dtype=np.float32) / ECHO_FLOATS + number % 100_003).tobytes()


class EmbedQuestion:
    """Asks for embeddings of texts. `learn` requests the expected vectors before the faults start."""

    def __init__(self, model: str, texts: Sequence[str]) -> None:
        self._model = model
        self._texts = texts
        self._vectors: dict[int, Any] = {}

    async def learn(self, target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            call = GRPCInferenceServiceStub(channel).ModelInfer
            for number in range(len(self._texts)):
                self._vectors[number] = _vector(await call(self.ask(number), timeout=30))

    def ask(self, number: int) -> pb.ModelInferRequest:
        return make_text_request(self._model, self._texts[number % len(self._texts)])

    def is_answer(self, number: int, answer: pb.ModelInferResponse) -> bool:
        # Vectors have length 1; other batches round differently, by less than any two texts differ.
        return float(_vector(answer) @ self._vectors[number % len(self._texts)]) > 0.999


@dataclass(slots=True)
class Tally:
    sent: int = 0
    answered: int = 0
    mismatched: int = 0
    duplicates: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # longest time of one request
    longest_gap_s: float = 0.0  # longest time without any answer
    last_answer: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> int:
        """Return the number of requests without a correct answer, except those still within their deadline."""
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
    """A context manager that runs a load, and waits for its pending requests on exit.

    Some callers use unary calls. The others share one stream, which would reveal a second answer to a request.
    """

    def __init__(self, target: str, questions: Sequence[Question], callers: int = 32, pause_s: float = 0.0) -> None:
        self.tally = Tally()
        self._questions = questions
        self._pause_s = pause_s  # pause between an answer and the caller's next request
        self._channel = grpc.aio.insecure_channel(target)
        self._unary = callers - callers // 4
        self._streamed = callers // 4
        self._numbers = itertools.count(1)
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "CheckedLoad":
        await asyncio.wait_for(self._channel.channel_ready(), 30)
        self._stream = UnorderedStream(self._channel)
        callers = [self._call_forever() for _ in range(self._unary)]
        callers += [self._stream_forever() for _ in range(self._streamed)]
        self._tasks = [asyncio.create_task(caller) for caller in callers]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0.2)  # wait for second answers, which would be errors
        await self._stream.close()
        self.tally.duplicates = self._stream.duplicates
        await self._channel.close()

    async def answered_more(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until `count` further requests were answered."""
        goal = self.tally.answered + count
        await until(lambda: self.tally.answered >= goal, f"{count} more answers", timeout_s)

    def _next(self) -> tuple[int, Question, pb.ModelInferRequest]:
        number = next(self._numbers)
        question = self._questions[number % len(self._questions)]
        message = question.ask(number)
        message.id = f"chaos-{number}"
        self.tally.sent += 1
        return number, question, message

    async def _call_forever(self) -> None:
        call = GRPCInferenceServiceStub(self._channel).ModelInfer
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

    async def _stream_forever(self) -> None:
        while not self._is_stopping:
            number, question, message = self._next()
            sent = time.monotonic()
            try:
                _, answer = await asyncio.wait_for(self._stream.ask(message), DEADLINE_S)
            except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
                self.tally.failures[f"stream: {type(error).__name__}"] += 1
                return
            if answer.error_message:
                self.tally.failures[f"stream: {answer.error_message}"] += 1
                continue
            self.tally.answer(sent, question.is_answer(number, answer.infer_response))
            await asyncio.sleep(self._pause_s)


def _vector(answer: pb.ModelInferResponse) -> Any:
    return np.frombuffer(answer.raw_output_contents[0], dtype=np.float32)
