"""Resolution of queries to blocks: sessions, policies, permissions, changes of the blocks."""

import asyncio
from typing import Any, ClassVar

import orjson
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.config import SearchSettings
from penstock.core.errors import DeadlineExceeded, InvalidRequest, NoMatch
from penstock.core.principals import ANYBODY, Principal
from penstock.core.requests import InferRequest, PacketFields
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_query import BlockQuery, read_query
from penstock.features.search.block_ranking import RankedBlock, RankingTurn
from penstock.features.search.block_search import REFRESH_S, BlockSearch, MeasuredRanker
from penstock.features.search.documents import BlockDocument
from penstock.telemetry.metrics import SearchMetrics
from tests.unit.features.search.conftest import Blocks

LLM = {"algorithmType": "llm", "model": "tiny-gpt"}


class SlowRanker:
    def names(self) -> list[str]:
        return ["slow:v1"]

    async def rank(self, query: BlockQuery, documents: Any, turn: RankingTurn, limit: int) -> list[RankedBlock]:
        await asyncio.sleep(60)
        return []


class FewSessions(SearchSettings):
    max_sessions: ClassVar[int] = 2


class Bed:
    def __init__(self, settings: SearchSettings | None = None) -> None:
        self.now = 0.0
        self.local, self.remote = Blocks(), Blocks("cluster-9")
        self.registry = CollectorRegistry()
        catalogue = BlockCatalogue([self.local, self.remote])
        self.search = BlockSearch(
            catalogue,
            [MeasuredRanker(catalogue), SlowRanker()],
            settings or SearchSettings(),
            SearchMetrics(self.registry),
            lambda: self.now,
        )

    async def resolve(self, query: Any, session: str = "s", principal: Principal = ANYBODY, left_s: float = 9.0) -> str:
        packet = PacketFields(session, query_parameters=orjson.dumps(query).decode())
        request = InferRequest("", [], packet=packet, principal=principal)
        return await self.search.resolve(request, self.now + left_s)

    async def found(self, query: Any, principal: Principal = ANYBODY) -> list[str]:
        found = await self.search.search(read_query(query), principal, RankingTurn(""))
        return [each.document.block_id for each in found.ranked]

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("penstock_search_resolutions_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def bed() -> Bed:
    return Bed()


def where(variable: str, operator: str, value: Any, policy: str = "least-loaded:v1", **settings: Any) -> dict[str, Any]:
    condition = {"variable": variable, "operator": operator, "value": value}
    rule = {"policyRuleURI": policy, "settings": settings}
    return {"filter": {"blockQuery": condition}, "rankingPolicyRule": rule}


async def test_a_session_keeps_its_block_until_its_time_is_over(bed: Bed) -> None:
    for name in ("blk-a", "blk-b"):
        bed.local.put(name)
    query = where("model", "IN", ["a", "b"], "round-robin")
    assert [await bed.resolve(query, "s-1") for _ in range(3)] == ["blk-a"] * 3
    assert await bed.resolve(query, "s-2") == "blk-b"
    assert (bed.count("searched"), bed.count("cached")) == (2, 2)
    bed.now = 601.0
    assert await bed.resolve(query, "s-1") == "blk-a"
    assert bed.count("searched") == 3


async def test_a_session_may_send_several_queries(bed: Bed) -> None:
    bed.local.put("blk-a")
    bed.local.put("blk-b")
    assert await bed.resolve(where("model", "==", "a")) == "blk-a"
    assert await bed.resolve(where("model", "==", "b")) == "blk-b"


@pytest.mark.parametrize("event", ["removed", "uncallable"])
async def test_a_session_searches_again_when_its_block_is_gone(bed: Bed, event: str) -> None:
    bed.local.put("blk-a")
    assert await bed.resolve({}) == "blk-a"
    bed.local.put("blk-b")
    if event == "removed":
        bed.local.remove("blk-a")
    else:
        bed.local.uncallable.add("blk-a")
    assert await bed.resolve({}) == "blk-b"


async def test_the_number_of_remembered_sessions_is_bounded() -> None:
    bed = Bed(FewSessions())
    bed.local.put("blk-a")
    for session in ("s-1", "s-2", "s-3", "s-3", "s-1"):
        await bed.resolve({}, session)
    assert bed.count("cached") == 1


async def test_a_new_block_is_found_at_once_and_an_unloaded_one_no_more(bed: Bed) -> None:
    query = where("metadata.algorithmType", "==", "llm")
    with pytest.raises(NoMatch, match="none of 0 blocks"):
        await bed.resolve(query)
    bed.local.put("blk-a", metadata=LLM)
    assert await bed.found(query) == ["blk-a"]
    bed.local.put("blk-a", metadata=LLM, state="unloaded")
    assert await bed.found(query) == []
    bed.local.put("blk-a", metadata={"algorithmType": "vision"})
    assert await bed.found(query) == []


async def test_blocks_that_were_taken_over_in_the_background_are_not_read_again(bed: Bed) -> None:
    bed.local.put("blk-a")
    await bed.search.refresh()
    assert len(bed.search.catalogue) == 1
    bed.local.found.clear()  # without a new revision, so that a search which reads again finds nothing
    assert await bed.found({}) == ["blk-a"]
    assert bed.search.pause_s >= REFRESH_S


async def test_a_request_runs_only_on_blocks_that_the_gateway_can_call(bed: Bed) -> None:
    bed.local.put("blk-near", metadata=LLM)
    bed.remote.put("blk-far", metadata=LLM)
    bed.remote.uncallable.add("blk-far")
    assert sorted(await bed.found({})) == ["blk-far", "blk-near"]
    assert await bed.resolve({}) == "blk-near"
    in_cluster = {"variable": "id", "operator": "==", "value": "cluster-9"}
    far = {"filter": {"clusterQuery": in_cluster}}
    with pytest.raises(
        NoMatch, match=r"none of 2 blocks .* in the cluster cluster-9, and this gateway cannot call them"
    ):
        await bed.resolve(far)
    with pytest.raises(NoMatch, match="0 match"):  # a key does not learn of blocks that it may not use
        await bed.resolve(far, principal=Principal("p", models=("near",)))


async def test_a_caller_finds_only_the_blocks_that_it_may_call(bed: Bed) -> None:
    bed.local.put("blk-a")
    bed.local.put("blk-b")
    assert await bed.found({}, Principal("p", models=("b",))) == ["blk-b"]
    assert await bed.resolve({}, principal=Principal("p", blocks=("blk-a",))) == "blk-a"


async def test_live_metrics_filter_and_rank(bed: Bed) -> None:
    for name, latencies in (("blk-a", [10.0, 50.0]), ("blk-b", [20.0]), ("blk-idle", [])):
        bed.local.put(name)
        bed.local.metrics[name] = [
            {"latency_ms": each, "in_flight": each, "waiting": 0.0, "credits": 10.0} for each in latencies
        ]

    def metric(aggregate: str, value: float) -> dict[str, Any]:
        condition = {"aggOperator": aggregate, "target": "latency_ms", "operator": ">=", "value": value}
        return {"filter": {"blockMetricsQuery": condition}, "rankingPolicyRule": {"policyRuleURI": "lowest-latency"}}

    assert await bed.found(metric("max", 50)) == ["blk-a"]
    assert await bed.found(metric("p95", 50)) == ["blk-a"]
    assert await bed.found(metric("p50", 10)) == ["blk-b", "blk-a"]
    assert await bed.found(metric("avg", 30)) == ["blk-a"]
    assert await bed.found(metric("sum", 0)) == ["blk-b", "blk-a"]
    assert await bed.found(metric("min", 20)) == ["blk-b"]
    assert await bed.found(metric("count", 2)) == ["blk-a"]
    assert await bed.found(where("model", "IN", ["a", "b", "idle"])) == ["blk-b", "blk-a", "blk-idle"]


async def test_a_preferred_region_comes_first_and_the_number_of_results_is_bounded(bed: Bed) -> None:
    bed.local = Blocks()
    for number in range(20):
        bed.remote.put(f"blk-{number:02}", metadata={"region": "eu"} if number == 7 else {})
    for policy in ("least-loaded", "lowest-latency", "round-robin", "random"):
        found = await bed.found(where("model", "LIKE", "*", policy, region="eu", top_k=5))
        assert found[0] == "blk-07"
        assert len(found) == 5


async def test_unknown_policies_and_settings_are_refused_by_name(bed: Bed) -> None:
    bed.local.put("blk-a")
    with pytest.raises(InvalidRequest, match=r"'fastest:v1'.*least-loaded:v1.*slow:v1"):
        await bed.resolve(where("model", "==", "a", "fastest"))
    with pytest.raises(InvalidRequest, match=r"unknown key 'zone'.*region"):
        await bed.resolve(where("model", "==", "a", zone="eu"))


async def test_a_search_has_a_deadline(bed: Bed) -> None:
    bed.local.put("blk-a")
    with pytest.raises(DeadlineExceeded):
        await bed.resolve(where("model", "==", "a", "slow"), left_s=0.01)


async def test_results_are_right_while_blocks_change_between_slices(bed: Bed) -> None:
    """Change blocks at each pause of a selection: what it returns is then still there and still matches."""
    catalogue, query = bed.search.catalogue, read_query(where("metadata.n", ">=", 0))
    for number in range(3000):
        bed.local.put(f"blk-{number}", metadata={"n": number})
    await bed.found({})
    steps, number = catalogue.select(query), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[BlockDocument] = end.value
            break
        bed.local.put(f"blk-{number}", metadata={"n": -1})
        bed.local.remove(f"blk-{number + 1}")
        number += 2
        for _ in catalogue.refresh():
            pass
    assert number > 4
    assert all(each.values["metadata"]["n"] >= 0 for each in found)
    assert not {"blk-0", "blk-1"} & {each.block_id for each in found}
    assert len(found) >= 3000 - number
