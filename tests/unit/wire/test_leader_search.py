"""The search for the leader among managers that answer late, wrongly or not at all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from structlog.testing import capture_logs

from benchmarks.waiting import until
from penstock.pb.v1.leader_pb2 import LeaderResponse
from penstock.wire import leader_search as asking
from penstock.wire.leader_connection import LeaderAddress
from penstock.wire.leader_search import LeaderSearch


class FakeManagers:
    def __init__(self) -> None:
        self.answers: dict[str, LeaderResponse | None] = {}  # None: the manager hangs
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
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(asking, "POLL_PAUSE_S", 0.01)
    monkeypatch.setattr(asking, "SEARCH_PAUSE_S", 0.01)


async def following(source: LeaderSearch) -> AsyncIterator[LeaderAddress]:
    async with aclosing(source.follow()) as heard:  # type: ignore[type-var]
        async with asyncio.timeout(60):
            async for each in heard:
                yield each


async def test_any_manager_names_the_leader_and_the_addresses_of_others() -> None:
    managers = FakeManagers()
    managers.lead("a", 5, "b", "c")
    managers.answers["a"] = None
    heard = following(LeaderSearch(["dead", "b"], managers.ask))
    assert await anext(heard) == LeaderAddress("a", 5)
    managers.lead("c", 6, "a", "b")
    managers.answers["b"] = None
    assert await anext(heard) == LeaderAddress("c", 6), "the leader is not among the configured managers"


async def test_learned_addresses_are_kept_when_a_disconnected_manager_answers() -> None:
    managers = FakeManagers()
    managers.lead("a", 5, "b", "c")
    heard = following(LeaderSearch(["a"], managers.ask))
    assert await anext(heard) == LeaderAddress("a", 5)
    managers.answers["a"] = LeaderResponse()
    managers.lead("c", 6, "b")
    assert await anext(heard) == LeaderAddress("c", 6)


async def test_a_leader_is_called_at_the_address_where_it_was_reached() -> None:
    managers = FakeManagers()
    managers.lead("a", 5)
    assert await anext(following(LeaderSearch(["a"], managers.ask))) == LeaderAddress("a", 5)


async def test_the_leader_named_by_a_disconnected_manager_is_ignored() -> None:
    managers = FakeManagers()
    managers.lead("new", 9, "old")
    managers.answers["old"] = LeaderResponse(is_leader=True, leader="old", epoch=5)
    source = LeaderSearch(["new", "old"], managers.ask)
    heard = following(source)
    first = await anext(heard)
    assert first == LeaderAddress("new", 9) or await anext(heard) == LeaderAddress("new", 9)
    source.search_now()
    managers.lead("old", 12, "new")
    assert await anext(heard) == LeaderAddress("old", 12)


async def test_while_a_leader_is_known_one_manager_is_asked_at_a_time() -> None:
    managers = FakeManagers()
    managers.lead("a", 5, "b", "c")
    source = LeaderSearch(["a", "b", "c"], managers.ask)
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


async def test_a_new_history_of_the_store_is_followed_and_the_former_is_ignored() -> None:
    managers = FakeManagers()
    managers.answers["a"] = LeaderResponse(is_leader=True, leader="a", epoch=50, history="h1")
    managers.answers["old"] = LeaderResponse(is_leader=True, leader="old", epoch=40, history="h1")
    source = LeaderSearch(["a", "old"], managers.ask)
    heard = following(source)
    while (first := await anext(heard)) != LeaderAddress("a", 50, "h1"):
        assert first == LeaderAddress("old", 40, "h1")
    managers.answers["a"] = LeaderResponse(is_leader=True, leader="a", epoch=3, history="h2")
    managers.answers["old"] = LeaderResponse(is_leader=True, leader="old", epoch=60, history="h1")
    source.search_now()
    found = [await anext(heard)]
    managers.answers["a"] = LeaderResponse(is_leader=True, leader="a", epoch=4, history="h2")
    while found[-1] != LeaderAddress("a", 4, "h2"):
        source.search_now()
        found.append(await anext(heard))
    assert LeaderAddress("old", 60, "h1") not in found[found.index(LeaderAddress("a", 3, "h2")) :]


async def test_missing_answers_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT_S", 0.001)
    monkeypatch.setattr(asking, "MAX_FAILED_ROUNDS", 2)
    managers = FakeManagers()
    with capture_logs() as said:
        heard = following(LeaderSearch(["dead"], managers.ask))
        seeking = asyncio.ensure_future(anext(heard))
        await until(lambda: len(managers.asked) > 5)
        managers.lead("dead", 5)
        await seeking
    (told,) = [each for each in said if each["event"] == "leader_not_found"]
    assert told["why"] == {"dead": "no answer in time"}
