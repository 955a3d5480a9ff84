"""One client's stream, with a fake serving that answers when the test allows it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.core.config import Limits
from penstock.core.errors import Cancelled, InvalidRequest, PenstockError, QueueFull, Unauthenticated, UnknownModel
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.core.tensors import Tensor
from penstock.gateway.websocket import request_stream
from penstock.gateway.websocket.request_stream import EMPTY_FINAL_PARAMETER, RequestStream
from penstock.gateway.websocket.stream_buffer import STREAM_WINDOW
from penstock.serving.admission import Admission

WAIT_S = 10.0
BAD = "bad"


def response(text: str, is_final: bool = True) -> InferResponse:
    outputs = [Tensor(text, "BYTES", (0,), b"")] if text else []
    return InferResponse("m", "1", "", outputs, Timing(), is_final=is_final)


@dataclass
class Exchange:
    """An exchange whose message is `model` or `model:n`; answers repeat it."""

    message: str
    parameters: dict[str, bool] = field(default_factory=dict)

    @property
    def request(self) -> InferRequest | PenstockError:
        if self.message == BAD:
            return InvalidRequest("cannot be read")
        made = InferRequest(self.message.partition(":")[0], [], request_id=self.message)
        made.parameters.update(self.parameters)
        return made

    @property
    def size_bytes(self) -> int:
        return 100

    async def encode(self, found: InferResponse, is_decoupled: bool) -> tuple[str, int]:
        if found.outputs and found.outputs[0].name == "infinite":
            raise InvalidRequest("cannot be carried")
        name = found.outputs[0].name if found.outputs else "nothing"
        return f"{self.message}={name}{'' if found.is_final else '+'}", 10

    def refuse(self, error: PenstockError) -> tuple[str, int]:
        return f"{self.message}!{error.code}", 10


class Serving:
    """A serving whose model `slow` waits for the test. `many` is decoupled: three answers, and an empty last one."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.admission = Admission(limits or Limits())
        self.started: list[str] = []
        self.resolved: list[str] = []
        self.cancelled: list[str] = []
        self.pulled = 0  # the number of answers that were requested
        self.may_pull = 1000
        self.go = asyncio.Event()
        self.resolver = SimpleNamespace(choose=self._choose)

    def admit(self) -> Principal:
        if self.pulled > self.may_pull:
            raise Unauthenticated("by now")
        return ANYBODY

    def _choose(self, request: InferRequest) -> object:
        model = request.model
        if model == "unknown":
            raise UnknownModel("unknown")
        self.resolved.append(model)
        settings = SimpleNamespace(is_decoupled=model.startswith("many"), may_stream=model.startswith(("many", "text")))
        return SimpleNamespace(model=model, settings=settings)

    async def serve(self, request: InferRequest, block: Any) -> InferResponse:
        assert (block.model if block else "unknown") == request.model
        self.started.append(request.request_id)
        try:
            if request.model == "slow":
                await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        if request.model == "unknown":
            raise UnknownModel("unknown")
        if request.model == "full":
            raise QueueFull("full")
        if request.model == "bug":
            raise ZeroDivisionError
        return response("infinite" if request.model == "infinite" else "ok")

    async def stream(self, request: InferRequest, block: Any) -> AsyncGenerator[InferResponse, None]:
        assert block.model == request.model
        self.started.append(request.request_id)
        try:
            for number in range(3):
                self.pulled += 1
                yield response(str(number), is_final=False)
            if request.model == "many_that_fail":
                raise QueueFull("full")
            yield response("")
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise


class Client:
    """The client's end of a stream, which the test controls."""

    def __init__(
        self, serving: Serving, is_ordered: bool = True, empty_final: bool = False, is_single: bool = False
    ) -> None:
        self.read = 0  # the number of messages that were requested
        self.heard: list[str] = []
        self.may_hear = asyncio.Semaphore(0)
        self._said: asyncio.Queue[str | None] = asyncio.Queue()
        self._parameters = {EMPTY_FINAL_PARAMETER: True} if empty_final else {}
        made: RequestStream[str] = RequestStream(cast(Any, serving), is_ordered, "test", serving.admit, is_single)
        self.task = asyncio.create_task(made.run(self._messages(), self._send))

    async def _messages(self) -> AsyncIterator[Exchange]:
        while (message := await self._said.get()) is not None:
            self.read += 1
            yield Exchange(message, self._parameters)

    async def _send(self, answer: str) -> None:
        await self.may_hear.acquire()
        self.heard.append(answer)

    def say(self, *messages: str) -> None:
        for message in messages:
            self._said.put_nowait(message)

    def leave(self) -> None:
        self._said.put_nowait(None)

    def listen(self, answers: int = 1000) -> None:
        for _ in range(answers):
            self.may_hear.release()

    async def end(self) -> list[str]:
        self.leave()
        await asyncio.wait_for(self.task, WAIT_S)
        return self.heard


async def settle(turns: int = 50) -> None:
    """Wait until all tasks wait for something."""
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.fixture
def serving() -> Serving:
    return Serving()


async def test_answers_keep_the_order_of_their_requests(serving: Serving) -> None:
    client = Client(serving)
    client.listen()
    client.say("slow", "quick:1", "quick:2")
    await settle()
    assert (serving.started, client.heard) == (["slow", "quick:1", "quick:2"], [])
    serving.go.set()
    assert await client.end() == ["slow=ok", "quick:1=ok", "quick:2=ok"]


async def test_unordered_streams_answer_as_requests_finish(serving: Serving) -> None:
    client = Client(serving, is_ordered=False)
    client.listen()
    client.say("slow", "quick:1", "quick:2")
    await settle()
    assert client.heard == ["quick:1=ok", "quick:2=ok"]
    serving.go.set()
    assert await client.end() == ["quick:1=ok", "quick:2=ok", "slow=ok"]


async def test_an_error_is_an_answer_and_the_stream_continues(serving: Serving) -> None:
    client = Client(serving)
    client.listen()
    client.say(BAD, "unknown", "full", "bug", "infinite", "quick")
    assert await client.end() == [
        "bad!invalid_request",
        "unknown!unknown_model",
        "full!queue_full",
        "bug!internal",
        "infinite!invalid_request",
        "quick=ok",
    ]


async def test_a_stream_stops_reading_at_its_window(serving: Serving) -> None:
    client = Client(serving)
    sent = STREAM_WINDOW + 50
    client.say(*(f"quick:{number}" for number in range(sent)))
    await settle(sent)
    # All messages that were read are answered, and nothing is read: the first answer waits to be sent.
    assert client.read == STREAM_WINDOW
    client.listen(10)
    await settle(sent)
    assert client.read == STREAM_WINDOW + 10
    client.listen()
    assert await client.end() == [f"quick:{number}=ok" for number in range(sent)]


async def test_a_decoupled_model_gives_several_answers(serving: Serving) -> None:
    client = Client(serving)
    client.listen()
    client.say("many", "quick")
    heard = await client.end()
    assert [answer for answer in heard if answer.startswith("many")] == ["many=0+", "many=1+", "many=2+"]
    assert "quick=ok" in heard
    assert serving.resolved == ["many", "quick"]


async def test_a_single_stream_gets_whole_answers(serving: Serving) -> None:
    client = Client(serving)
    client.listen()
    client.say("text")
    assert await client.end() == ["text=0+", "text=1+", "text=2+"]
    client = Client(serving, is_single=True)
    client.listen()
    client.say("text", "many")
    assert await client.end() == ["text=ok", "many=0+", "many=1+", "many=2+"]


async def test_the_empty_last_answer_is_sent_on_request(serving: Serving) -> None:
    client = Client(serving, empty_final=True)
    client.listen()
    client.say("many")
    assert await client.end() == ["many=0+", "many=1+", "many=2+", "many=nothing"]


async def test_a_decoupled_model_that_fails_ends_with_an_error(serving: Serving) -> None:
    client = Client(serving)
    client.listen()
    client.say("many_that_fail")
    assert await client.end() == [
        "many_that_fail=0+",
        "many_that_fail=1+",
        "many_that_fail=2+",
        "many_that_fail!queue_full",
    ]


async def test_a_revoked_key_gets_no_further_answers(serving: Serving) -> None:
    serving.may_pull = 2
    client = Client(serving)
    client.listen()
    client.say("many")
    assert await client.end() == ["many=0+", "many=1+", "many!unauthenticated"]
    assert serving.cancelled == ["many"]


async def test_a_client_that_does_not_read_stops_a_decoupled_model(serving: Serving) -> None:
    client = Client(serving)
    client.say("many")
    await settle()
    assert serving.pulled == 1
    client.listen(1)
    await settle()
    assert serving.pulled == 2
    client.listen()
    assert len(await client.end()) == 3


async def test_decoupled_answers_do_not_wait_for_slow_requests(serving: Serving) -> None:
    client = Client(serving)
    client.listen()
    client.say("slow", "many")
    await settle()
    assert client.heard == ["many=0+", "many=1+", "many=2+"]
    serving.go.set()
    assert (await client.end())[-1] == "slow=ok"


async def test_a_disconnect_cancels_all_requests_of_the_stream(serving: Serving) -> None:
    client = Client(serving)
    client.say("slow:1", "slow:2", "many")
    await settle()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    await settle()
    assert sorted(serving.cancelled) == ["many", "slow:1", "slow:2"]


async def test_a_reader_that_fails_ends_the_stream(serving: Serving) -> None:
    async def messages() -> AsyncIterator[Exchange]:
        yield Exchange("slow")
        await settle()
        raise ConnectionResetError

    made: RequestStream[str] = RequestStream(cast(Any, serving), True, "test", serving.admit)

    async def send(answer: str) -> None:
        raise AssertionError("nothing is answered")

    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(made.run(messages(), send), WAIT_S)
    await settle()
    assert serving.cancelled == ["slow"]


async def test_answers_count_until_they_are_sent(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_stream, "COUNTED_BYTES", 0)
    client = Client(serving)
    client.say("quick", "quick")
    await settle()
    assert serving.admission.unsent.bytes == 20
    client.may_hear.release()
    await settle()
    assert serving.admission.unsent.bytes == 10
    serving.admission.unsent.max_bytes = 15
    client.say("quick")
    with pytest.raises(Cancelled, match="too slowly"):
        await asyncio.wait_for(client.task, WAIT_S)
    assert serving.admission.unsent.bytes == 0


async def test_a_client_that_reads_nothing_for_long_is_disconnected() -> None:
    serving = Serving(Limits(answer_timeout_s=0.02))
    client = Client(serving)
    client.say("quick", "slow")
    with pytest.raises(Cancelled, match="read no answer"):
        await asyncio.wait_for(client.task, WAIT_S)
    await settle()
    assert serving.cancelled == ["slow"]
