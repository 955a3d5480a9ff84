"""Who leads is found among managers that answer late, wrongly or not at all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.pb.v1.leader_pb2 import LeaderResponse
from penstock.wire import asking
from penstock.wire.asking import AskedManagers
from penstock.wire.leader import LeaderAt


class FakeManagers:
    def __init__(self) -> None:
        self.answers: dict[str, LeaderResponse | None] = {}  # None: it hangs
        self.asked: list[str] = []

    async def ask(self, address: str) -> LeaderResponse:
        self.asked.append(address)
        answer = self.answers.get(address)
        if answer is None:
            await asyncio.Event().wait()
        assert answer is not None
        return answer

    def lead(self, leader: str, epoch: int, *others: str) -> None:
        managers = [leader, *others]
        self.answers[leader] = LeaderResponse(is_leader=True, leader=f"nat-{leader}", epoch=epoch, managers=managers)
        for other in others:
            self.answers[other] = LeaderResponse(leader=leader, epoch=epoch, managers=managers)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_S", 0.05)
    monkeypatch.setattr(asking, "POLL_S", 0.01)
    monkeypatch.setattr(asking, "SEEK_S", 0.01)


async def following(source: AskedManagers) -> AsyncIterator[LeaderAt]:
    async with aclosing(source.follow()) as heard:  # type: ignore[type-var]
        async with asyncio.timeout(60):
            async for each in heard:
                yield each


async def test_the_leader_is_named_by_whoever_answers_and_others_are_learned() -> None:
    managers = FakeManagers()
    managers.lead("a", 5, "b", "c")
    managers.answers["a"] = None
    heard = following(AskedManagers(["dead", "b"], managers.ask))
    assert await anext(heard) == LeaderAt("a", 5)
    managers.lead("c", 6, "a", "b")
    managers.answers["b"] = None
    assert await anext(heard) == LeaderAt("c", 6), "which was not among those that were given"


async def test_who_was_learned_is_not_forgotten_for_one_that_was_cut_off() -> None:
    managers = FakeManagers()
    managers.lead("a", 5, "b", "c")
    heard = following(AskedManagers(["a"], managers.ask))
    assert await anext(heard) == LeaderAt("a", 5)
    managers.answers["a"] = LeaderResponse()
    managers.lead("c", 6, "b")
    assert await anext(heard) == LeaderAt("c", 6)


async def test_a_leader_is_called_where_it_was_reached() -> None:
    managers = FakeManagers()
    managers.lead("a", 5)
    assert await anext(following(AskedManagers(["a"], managers.ask))) == LeaderAt("a", 5)


async def test_what_somebody_who_was_cut_off_believes_is_passed_over() -> None:
    managers = FakeManagers()
    managers.lead("new", 9, "old")
    managers.answers["old"] = LeaderResponse(is_leader=True, leader="old", epoch=5)
    source = AskedManagers(["new", "old"], managers.ask)
    heard = following(source)
    first = await anext(heard)
    assert first == LeaderAt("new", 9) or await anext(heard) == LeaderAt("new", 9)
    source.hurry()
    managers.lead("old", 12, "new")
    assert await anext(heard) == LeaderAt("old", 12)


async def test_while_somebody_leads_one_is_asked_at_a_time() -> None:
    managers = FakeManagers()
    managers.lead("a", 5, "b", "c")
    source = AskedManagers(["a", "b", "c"], managers.ask)
    heard = following(source)
    await anext(heard)
    waiting = asyncio.ensure_future(anext(heard))
    managers.asked.clear()
    async with asyncio.timeout(60):
        while len(managers.asked) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_another_history_of_the_store_is_followed_and_the_one_before_no_more() -> None:
    managers = FakeManagers()
    managers.answers["a"] = LeaderResponse(is_leader=True, leader="a", epoch=50, history="h1")
    managers.answers["old"] = LeaderResponse(is_leader=True, leader="old", epoch=40, history="h1")
    source = AskedManagers(["a", "old"], managers.ask)
    heard = following(source)
    while (first := await anext(heard)) != LeaderAt("a", 50, "h1"):
        assert first == LeaderAt("old", 40, "h1")
    managers.answers["a"] = LeaderResponse(is_leader=True, leader="a", epoch=3, history="h2")
    managers.answers["old"] = LeaderResponse(is_leader=True, leader="old", epoch=60, history="h1")
    source.hurry()
    found = [await anext(heard)]
    managers.answers["a"] = LeaderResponse(is_leader=True, leader="a", epoch=4, history="h2")
    while found[-1] != LeaderAt("a", 4, "h2"):
        source.hurry()
        found.append(await anext(heard))
    assert LeaderAt("old", 60, "h1") not in found[found.index(LeaderAt("a", 3, "h2")) :]


async def test_that_nobody_answers_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_S", 0.001)
    monkeypatch.setattr(asking, "VAIN", 2)
    managers = FakeManagers()
    with capture_logs() as said:
        heard = following(AskedManagers(["dead"], managers.ask))
        seeking = asyncio.ensure_future(anext(heard))
        await until(lambda: len(managers.asked) > 5)
        managers.lead("dead", 5)
        await seeking
    (told,) = [each for each in said if each["event"] == "no_leader"]
    assert told["why"] == {"dead": "it did not answer in time"}
