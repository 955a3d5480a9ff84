"""Registered policies run in real processes: their rankings, and what a failing policy does to its callers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.config import SearchSettings
from penstock.core.errors import InvalidRequest, PolicyFailed
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery
from penstock.features.search.block_ranking import RankingTurn
from penstock.features.search.registered.policy_record import MAX_CODE_BYTES, POLICIES, PolicyRecord, check_policy
from penstock.features.search.registered.registered_ranker import RegisteredRanker
from penstock.telemetry.metrics import SearchMetrics
from tests.unit.features.search.conftest import Blocks, run

BY_SIZE = """
def rank(candidates, context):
    key = context["settings"]["key"]
    return [[each["id"], each["metadata"][key]] for each in sorted(candidates, key=lambda each: each["metadata"][key])]
"""
MOODY = """
import os, sys, time

def rank(candidates, context):
    mood = context["parameters"]["mood"]
    if mood == "hang":
        time.sleep(60)
    if mood == "crash":
        os._exit(3)
    if mood == "raise":
        raise ValueError("no candidate suits")
    if mood == "memory":
        return len(bytearray(1 << 30))
    if mood == "print":
        print("x" * 100_000)
    answers = {"unknown": ["blk-x"], "twice": ["blk-a", "blk-a"], "none": None, "object": {"a": 1}, "set": {1},
        "nan": [["blk-a", float("nan")]], "print": ["blk-a"], "empty": []}
    return answers.get(mood, ["blk-b", "blk-a"])
"""


class Bed:
    def __init__(self) -> None:
        self.blocks = Blocks()
        for name, size in (("blk-a", 2), ("blk-b", 1)):
            self.blocks.put(name, metadata={"size": size})
        catalogue = BlockCatalogue([self.blocks])
        run(catalogue.refresh())
        settings = SearchSettings(policy_timeout_s=1.0, policy_memory_mb=128, max_policy_processes=1)
        self.registry = CollectorRegistry()
        self.ranker = RegisteredRanker(catalogue, settings, SearchMetrics(self.registry))

    def register(self, **policies: str) -> None:
        records = [PolicyRecord(name=f"{name}:v1", code=code) for name, code in policies.items()]
        self.ranker.records_changed({POLICIES + each.name: each.model_dump_json().encode() for each in records})

    async def rank(self, name: str, **query: Any) -> list[str]:
        asked = BlockQuery(policy=f"{name}:v1", **query)
        found = await self.ranker.rank(asked, self.blocks.documents(), RankingTurn("s"), 10)
        return [each.document.block_id for each in found]

    async def in_mood(self, mood: str) -> list[str]:
        return await self.rank("moody", parameters={"mood": mood})


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    bed = Bed()
    yield bed
    await bed.ranker.close()


async def test_a_policy_ranks_the_candidates(bed: Bed) -> None:
    bed.register(by_size=BY_SIZE)
    assert bed.ranker.names() == ["by_size:v1"]
    assert await bed.rank("by_size", settings={"key": "size"}) == ["blk-b", "blk-a"]


async def test_a_failing_policy_is_an_error_and_the_next_call_works(bed: Bed) -> None:
    bed.register(moody=MOODY)
    for mood, message in (
        ("raise", "no candidate suits"),
        ("crash", "process ended"),
        ("hang", "did not answer within 1 s"),
        ("memory", "memory"),
        ("unknown", "returned blk-x"),
        ("twice", "returned blk-a"),
        ("none", "returned NoneType"),
        ("object", "returned dict"),
        ("set", "not JSON serializable"),
        ("nan", "Out of range"),
    ):
        with pytest.raises(PolicyFailed, match=message):
            await bed.in_mood(mood)
        assert await bed.in_mood("good") == ["blk-b", "blk-a"]
    assert await bed.in_mood("print") == ["blk-a"]
    assert await bed.in_mood("empty") == []
    labels = {"policy": "moody:v1"}
    assert bed.registry.get_sample_value("penstock_search_policy_failures_total", labels) == 10


async def test_a_policy_that_cannot_be_loaded_is_an_error(bed: Bed) -> None:
    bed.register(broken="import nothing_of_this_name\ndef rank(candidates, context): ...")
    with pytest.raises(PolicyFailed, match="nothing_of_this_name"):
        await bed.rank("broken")


async def test_a_changed_policy_replaces_its_process_and_idle_ones_make_room(bed: Bed) -> None:
    bed.register(one="def rank(c, x): return ['blk-a']", two="def rank(c, x): return ['blk-b']")
    assert (await bed.rank("one"), await bed.rank("two")) == (["blk-a"], ["blk-b"])  # one process at a time
    bed.register(two="def rank(c, x): return []")
    assert await bed.rank("two") == []
    assert bed.ranker.names() == ["two:v1"]


async def test_a_caller_that_leaves_does_not_disturb_the_next(bed: Bed) -> None:
    bed.register(moody=MOODY)
    await bed.in_mood("good")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await bed.in_mood("hang")
    assert await bed.in_mood("good") == ["blk-b", "blk-a"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("noversion", b"", "NAME:VERSION"),
        ("a/b:v1", b"", "NAME:VERSION"),
        ("random:v1", b"", "built-in"),
        ("p:v1", b"def rank(", "not Python"),
        ("p:v1", b"\xff", "not Python"),
        ("p:v1", b"(" * 5000, "not Python"),
        ("p:v1", b"def order(): ...", "no function rank"),
        ("p:v1", b"#" * (MAX_CODE_BYTES + 1), "may have"),
    ],
)
def test_a_policy_is_checked_before_it_is_registered(name: str, code: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_policy(name, code)
