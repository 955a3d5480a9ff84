"""The asynchronous requests of one gateway: who may see them, how many run, and how they end."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from penstock.core.config import AsyncSettings
from penstock.core.errors import EngineFailed, NotFound, Overloaded, StoreUnavailable
from penstock.core.principals import Principal, Scope
from penstock.features.async_requests.async_records import AsyncRecord, AsyncState, StoredAnswer
from penstock.features.async_requests.async_requests import AsyncRequests, Run
from penstock.features.async_requests.async_store import AsyncStore, open_async_store

ONE, OTHER = (Principal(name, name, frozenset({Scope.INFERENCE})) for name in ("one", "other"))


class SmallAnswers(AsyncSettings):
    max_result_bytes: ClassVar[int] = 1024


class ShortRuns(AsyncSettings):
    max_run_s: ClassVar[float] = 0.01


SETTINGS = SmallAnswers(max_running=1, max_bytes=2048)


@pytest.fixture
async def requests(tmp_path: Path) -> AsyncIterator[AsyncRequests]:
    made = AsyncRequests(SETTINGS, open_async_store(SETTINGS, tmp_path))
    yield made
    await made.close()


async def forever() -> StoredAnswer:
    await asyncio.Event().wait()
    raise AssertionError


def answering(body: bytes = b"") -> Run:
    async def run() -> StoredAnswer:
        return StoredAnswer(200, "text/plain", body)

    return run


async def ended(requests: AsyncRequests, record: AsyncRecord, caller: Principal = ONE) -> AsyncRecord:
    for _ in range(10_000):
        found = await requests.find(record.request_id, caller)
        if found.state is not AsyncState.RUNNING:
            return found
        await asyncio.sleep(0)
    raise AssertionError(found)


async def code_of(requests: AsyncRequests, record: AsyncRecord) -> tuple[AsyncState, str]:
    found = await ended(requests, record)
    return found.state, json.loads((await requests.get_answer(found)).body)["error"]["code"]


async def test_only_the_callers_key_finds_a_request(requests: AsyncRequests) -> None:
    record = await requests.start(ONE, "/", forever)
    assert await requests.find(record.request_id, ONE) == record
    with pytest.raises(NotFound):
        await requests.find(record.request_id, OTHER)
    with pytest.raises(NotFound):
        await requests.find("absent", ONE)


async def test_only_so_many_run_at_once(requests: AsyncRequests) -> None:
    record = await requests.start(ONE, "/", forever)
    with pytest.raises(Overloaded, match="max_running"):
        await requests.start(OTHER, "/", forever)
    await requests.cancel(record)
    assert await code_of(requests, record) == (AsyncState.CANCELLED, "cancelled")
    assert (await ended(requests, await requests.start(ONE, "/", answering()))).state is AsyncState.SUCCEEDED


async def test_failures_are_stored_as_errors(requests: AsyncRequests) -> None:
    async def fail() -> StoredAnswer:
        raise EngineFailed("it failed")

    async def break_down() -> StoredAnswer:
        raise ValueError

    for run, code in ((fail, "engine_failed"), (break_down, "internal"), (answering(bytes(1025)), "overloaded")):
        record = await requests.start(ONE, "/", run)
        assert await code_of(requests, record) == (AsyncState.FAILED, code)
        await requests.cancel(await ended(requests, record))
        with pytest.raises(NotFound):
            await requests.find(record.request_id, ONE)


async def test_an_answer_without_room_is_an_error(requests: AsyncRequests) -> None:
    for _ in range(2):
        record = await requests.start(ONE, "/", answering(bytes(900)))
        assert (await ended(requests, record)).state is AsyncState.SUCCEEDED
    record = await requests.start(ONE, "/", answering(bytes(900)))
    assert await code_of(requests, record) == (AsyncState.FAILED, "overloaded")


async def test_a_request_that_takes_too_long_ends(tmp_path: Path) -> None:
    settings = ShortRuns()
    requests = AsyncRequests(settings, open_async_store(settings, tmp_path))
    record = await requests.start(ONE, "/", forever)
    assert await code_of(requests, record) == (AsyncState.FAILED, "deadline_exceeded")
    await requests.close()


async def test_a_gateway_that_closes_reports_it_to_the_callers(tmp_path: Path) -> None:
    store = open_async_store(SETTINGS, tmp_path)
    requests, others = AsyncRequests(SETTINGS, store), AsyncRequests(SETTINGS, open_async_store(SETTINGS, tmp_path))
    record = await requests.start(ONE, "/", forever)
    await asyncio.sleep(0)
    await requests.close()
    assert await code_of(others, record) == (AsyncState.FAILED, "draining")
    await others.close()


class AwayStore:
    """A store that does not answer until `is_away` is False."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        if self.is_away and name != "close":
            raise StoreUnavailable("away")
        return getattr(self._store, name)


async def test_an_answer_waits_until_its_store_is_back(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"max_running": 1})
    store = AwayStore(open_async_store(settings, tmp_path))
    requests, others = (AsyncRequests(settings, cast(Any, store)) for _ in range(2))
    go = asyncio.Event()

    async def run() -> StoredAnswer:
        await go.wait()
        return StoredAnswer(200, "text/plain", b"late")

    record = await requests.start(ONE, "/", run)
    await store.finish(replace(record, alive_until=0.0), StoredAnswer(0, "", b""))  # as after a long outage
    store.is_away = True
    go.set()
    await asyncio.sleep(0.01)
    await requests.tick()  # fails, and is no failure of the gateway
    with pytest.raises(Overloaded, match="max_running"):
        await requests.start(ONE, "/", forever)
    with pytest.raises(StoreUnavailable):
        await others.find(record.request_id, ONE)
    store.is_away = False
    assert (await others.find(record.request_id, ONE)).state is not AsyncState.LOST
    async with asyncio.timeout(30):
        while (found := await requests.find(record.request_id, ONE)).state is AsyncState.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (found.state, (await requests.get_answer(found)).body) == (AsyncState.SUCCEEDED, b"late")
    await requests.close()
    await others.close()


async def test_another_gateway_cancels_through_the_store(tmp_path: Path) -> None:
    requests, others = (AsyncRequests(SETTINGS, open_async_store(SETTINGS, tmp_path)) for _ in range(2))
    record = await requests.start(ONE, "/", forever)
    await others.cancel(await others.find(record.request_id, ONE))
    await requests.tick()
    assert await code_of(others, record) == (AsyncState.CANCELLED, "cancelled")
    await requests.close()
    await others.close()
