"""Clients that send the requests of sessions out of order, some of them twice, and check each answer."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from random import Random
from typing import Any

import grpc

from penstock.core.errors import ERRORS_BY_CODE, DeadlineExceeded
from penstock.pb.inference import grpc_service_pb2 as pb
from tests.chaos.checked_load import EchoQuestion
from tests.chaos.unordered import UnorderedStream

MAX_DISPLACEMENT = 6.0  # maximum distance of a request from its position in the order
ANSWER_S = 60.0
PATIENCE_S = 120.0  # time to retry one request
PAUSE_S = 0.05
# without this option, clients would share a connection
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
# After these errors the session's step can be repeated: a client that wants its answer sends it again.
RETRYABLE_CODES = {code for code, error in ERRORS_BY_CODE.items() if error.is_retryable} | {DeadlineExceeded.code}
QUESTION = EchoQuestion()


@dataclass(frozen=True, slots=True)
class Shape:
    name: str = "session"  # session names: different for each load of one server
    sessions: int = 10_000
    steps: int = 10
    clients: int = 16
    abreast: int = 8  # sessions of one client at a time
    twice: float = 0.1  # share of the requests that are sent twice
    kills: int = 5

    def content(self, session: int, seq_no: int) -> int:
        """Return a number that is unique for the request, as its content."""
        return session * self.steps + seq_no


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """An answer, its expected content, and its position among all answers of its stream."""

    seq_no: int
    content: int
    arrival: int
    response: pb.ModelInferResponse

    @property
    def place(self) -> int:
        return int(self.response.parameters["session_step"].int64_param)


@dataclass(slots=True)
class SessionTally:
    sent: int = 0
    answered: int = 0
    sent_twice: int = 0  # requests that were sent twice on purpose
    repeats: int = 0  # answers that the server repeated from its record
    kills: int = 0
    lost: int = 0  # never answered
    wrong: int = 0  # another request's answer
    out_of_order: int = 0
    ran_twice: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def violations(self) -> int:
        return self.lost + self.wrong + self.out_of_order + self.ran_twice

    def check(self, answers: Iterable[AnsweredStep]) -> None:
        """Check all answers of one session."""
        by_number: defaultdict[int, list[AnsweredStep]] = defaultdict(list)
        for each in answers:
            by_number[each.seq_no].append(each)
            self.repeats += "session_repeat" in each.response.parameters
            self.wrong += not QUESTION.is_answer(each.content, each.response)
        before = -1
        for seq_no in sorted(by_number):
            places = {each.place for each in by_number[seq_no]}
            arrival = min(each.arrival for each in by_number[seq_no])
            self.ran_twice += len(places) > 1
            self.out_of_order += seq_no not in places or arrival < before
            before = arrival

    def details(self) -> dict[str, Any]:
        return {**asdict(self), "failures": dict(self.failures)}


class SessionClient:
    """A client with one stream, on which answers arrive when ready, but in order within a session."""

    def __init__(self, target: str, number: int, shape: Shape, tally: SessionTally) -> None:
        self._number = number
        self._shape = shape
        self._tally = tally
        self._rng = Random(number)
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._ids = count(1)

    async def run(self) -> None:
        async with self._channel:
            stream = UnorderedStream(self._channel)
            sessions = iter(range(self._number, self._shape.sessions, self._shape.clients))
            try:
                await asyncio.gather(*(self._play_all(sessions, stream) for _ in range(self._shape.abreast)))
            finally:
                await stream.close()

    async def _play_all(self, sessions: Iterator[int], stream: UnorderedStream) -> None:
        for session in sessions:
            told = await asyncio.gather(
                *(self._send_until_answered(session, seq_no, stream) for seq_no in self._draw_order())
            )
            self._tally.check(each for each in told if each is not None)
            self._tally.lost += told.count(None)

    def _draw_order(self) -> list[int]:
        numbers = list(range(1, self._shape.steps + 1))
        again = [seq_no for seq_no in numbers if self._rng.random() < self._shape.twice]
        self._tally.sent_twice += len(again)
        return sorted(numbers + again, key=lambda seq_no: seq_no + self._rng.uniform(0, MAX_DISPLACEMENT))

    async def _send_until_answered(self, session: int, seq_no: int, stream: UnorderedStream) -> AnsweredStep | None:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._tally.sent += 1
                arrival, answer = await asyncio.wait_for(stream.ask(self._make_message(session, seq_no)), ANSWER_S)
            except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
                self._tally.failures[type(error).__name__] += 1
                return None
            if not answer.error_message:
                self._tally.answered += 1
                return AnsweredStep(seq_no, self._shape.content(session, seq_no), arrival, answer.infer_response)
            code = answer.infer_response.parameters["penstock-code"].string_param
            self._tally.failures[code if code in RETRYABLE_CODES else f"{code}: {answer.error_message}"] += 1
            if code not in RETRYABLE_CODES or time.monotonic() > give_up:
                return None
            await asyncio.sleep(PAUSE_S)

    def _make_message(self, session: int, seq_no: int) -> pb.ModelInferRequest:
        message = QUESTION.ask(self._shape.content(session, seq_no))
        message.id = str(next(self._ids))
        message.parameters["session_id"].string_param = f"{self._shape.name}-{session}"
        message.parameters["seq_no"].int64_param = seq_no
        message.parameters["sequence_end"].bool_param = seq_no == self._shape.steps
        return message
