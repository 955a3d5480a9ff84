"""The process of a generating model, with a scripted batch."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from penstock.core.generation import Generation, GenerationState, Progress, Prompt, Sampling
from penstock.engines.genai import genai_host as host
from penstock.engines.genai.genai_messages import pack_generation, unpack_step
from penstock.wire.ipc.ipc_messages import Envelope, Inbox, Message


class ScriptedBatch:
    def __init__(self, *_: object) -> None:
        self.state = GenerationState()
        self.running: list[int] = []
        self.waiting: list[int] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.running)

    def facts(self) -> dict[str, Any]:
        return {"context_tokens": 8}

    def add(self, number: int, generation: object) -> None:
        self.waiting.append(number)

    def cancel(self, number: int) -> None:
        self.running.remove(number)

    def join(self) -> list[int]:
        joined, self.waiting = self.waiting, []
        self.running += joined
        return joined

    def step(self) -> None:
        if 13 in self.running:
            raise RuntimeError("the runtime is at its end")
        self.state.steps += 1

    def take_progress(self) -> list[Progress]:
        ended, self.running = self.running, []
        return [Progress(number, is_over=True) for number in ended]


class Exited(Exception):
    pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    ours, theirs = socket.socketpair()

    def leave(code: int) -> NoReturn:
        raise Exited(code)

    monkeypatch.setattr(host, "GenerationBatch", ScriptedBatch)
    monkeypatch.setattr("os._exit", leave)
    inbox = Inbox()

    def heard() -> list[Envelope]:
        return inbox.feed(ours.recv(65536))

    def send(kind: str, **fields: Any) -> None:
        ours.sendall(Message(kind, fields).pack())

    with ours, theirs:
        yield SimpleNamespace(host=host.GenerationHost(theirs), send=send, heard=heard, close=ours.close)


def ask(engine: SimpleNamespace, *numbers: int) -> None:
    engine.send("load", nice=0)
    for number in numbers:
        engine.send("add", **pack_generation(number, Generation(Prompt(text="x"), Sampling())))


def test_requests_before_a_step_join_it_and_their_progress_is_sent_together(engine: SimpleNamespace) -> None:
    ask(engine, 1, 2)
    engine.send("stop")
    engine.host.run()
    loaded, joined, step = engine.heard()
    assert (loaded.kind, loaded.fields) == ("loaded", {"context_tokens": 8})
    assert (joined.kind, joined.fields) == ("joined", {"numbers": [1, 2]})
    assert [progress.number for progress in unpack_step(step.fields).progress] == [1, 2]


def test_a_failed_step_fails_its_generations_and_ends_the_process(
    engine: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(engine, 12, 13)
    with pytest.raises(Exited):
        engine.host.run()
    *_, step = engine.heard()
    found = unpack_step(step.fields).progress
    assert [(each.number, each.is_over) for each in found] == [(12, True), (13, True)]
    assert all(
        each.failure and each.failure.message == "the engine failed: the runtime is at its end" for each in found
    )
    assert "the runtime is at its end" in capsys.readouterr().err


def test_the_process_ends_with_its_engine(engine: SimpleNamespace) -> None:
    ask(engine)
    engine.close()
    engine.host.run()
