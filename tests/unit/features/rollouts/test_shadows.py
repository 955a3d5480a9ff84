"""Copies of requests for a shadow block: their selection and their limits; clients do not notice them."""

import asyncio
from pathlib import Path

import pytest

from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.errors import EngineFailed
from penstock.core.requests import InferResponse, Timing
from penstock.core.tensors import Tensor
from penstock.features.rollouts import shadows
from penstock.serving.forwarded import ForwardedRequests
from tests.unit.serving.test_serve import Bed, ask

MODEL, SHADOW = "plain", "kept"


class ShadowBed(Bed):
    def __init__(self, folder: Path, is_compared: bool = True) -> None:
        super().__init__(folder)
        self.resolver._draw = lambda: 0.0
        self.shadow_id = self.resolver.resolve(SHADOW, "").block_id
        old = self.resolver.resolve(MODEL, "").block_id
        route = NameRoute(
            MODEL, (BlockShare(old, 1),), shadow=self.shadow_id, shadow_share=0.5, is_compared=is_compared
        )
        self.resolver.set_routes([route])
        self.serving.plans.watch([route])

    def copies(self, outcome: str) -> float:
        labels = {"model": SHADOW, "version": "3", "outcome": outcome}
        return self.registry.get_sample_value("penstock_shadow_requests_total", labels) or 0.0

    async def settle(self) -> None:
        await self.serving.shadows._tasks.wait()

    def ran(self) -> list[str]:
        return [described.model for described, _, _ in self.dispatcher.ran]


@pytest.fixture
def bed(tmp_path: Path) -> ShadowBed:
    return ShadowBed(tmp_path)


async def test_an_answered_request_is_copied_without_its_controls(bed: ShadowBed) -> None:
    await bed.serving.serve(ask(MODEL, parameters={"temperature": 0.5, "priority": 1, "cache": "refresh"}))
    assert bed.ran() == [MODEL], "the client gets its answer before the copy runs"
    await bed.settle()
    assert bed.ran() == [MODEL, SHADOW]
    _, copy, _ = bed.dispatcher.ran[1]
    assert copy.parameters == {"temperature": 0.5}
    assert bed.copies("ok") == bed.copies("same") == 1
    counts = {each.block_id: each for each in bed.serving.plans.watches.take_counts() if not each.is_control}
    assert counts[bed.shadow_id].answers == 1
    assert sum(counts[bed.shadow_id].latencies.values()) == 1
    assert bed.count(SHADOW, "ok") == 0, "a copy is not counted as a client's request"


async def test_a_failed_copy_is_counted_and_affects_no_client(bed: ShadowBed) -> None:
    bed.dispatcher.error, bed.dispatcher.failing = EngineFailed("no"), {bed.shadow_id}
    await bed.serving.serve(ask(MODEL))
    await bed.settle()
    assert (bed.copies("failed"), bed.copies("ok")) == (1, 0)
    (counts,) = [each for each in bed.serving.plans.watches.take_counts() if each.errors and not each.is_control]
    assert counts.errors == {"engine_failed": 1}


async def test_different_outputs_are_counted(bed: ShadowBed) -> None:
    given = InferResponse("", "", "", [Tensor("x", "UINT8", (1, 1), b"\7")], Timing(compute_ns=1))
    bed.serving.shadows.offer(ask(MODEL), given)
    await bed.settle()
    assert (bed.copies("different"), bed.copies("same")) == (1, 0)


async def test_only_requests_by_the_routed_name_without_a_session_are_copied(bed: ShadowBed) -> None:
    await bed.serving.serve(ask(MODEL, version="3"))
    await bed.serving.serve(ask(bed.resolver.resolve(MODEL, "").block_id))
    await bed.serving.serve(ask(MODEL, parameters={"session_id": "s"}))
    await bed.settle()
    assert bed.ran() == [MODEL] * 3


async def test_the_configured_share_of_requests_is_copied(bed: ShadowBed) -> None:
    split = bed.resolver.find_split(MODEL)
    assert split is not None
    split._draw = lambda: 0.6
    await bed.serving.serve(ask(MODEL))
    await bed.settle()
    assert bed.ran() == [MODEL]


async def test_copies_are_dropped_first_under_load(bed: ShadowBed, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await bed.serving.serve(ask(MODEL))
    await bed.settle()
    bed.dispatcher.gate.clear()
    monkeypatch.setattr(shadows, "MAX_COPIES", 3)
    for _ in range(5):
        bed.serving.shadows.offer(ask(MODEL), answer)
    assert bed.copies("dropped") == 2
    await asyncio.sleep(0)
    await bed.serving.shadows.close()
    assert bed.serving.shadows._bytes == 0
    monkeypatch.setattr(shadows, "MAX_COPY_BYTES", 5)
    bed.serving.shadows.offer(ask(MODEL), answer)
    assert bed.copies("dropped") == 3
    monkeypatch.setattr(shadows, "MAX_COPY_BYTES", 500)
    bed.admission.inflight_requests = bed.admission.limits.max_inflight_requests
    bed.serving.shadows.offer(ask(MODEL), answer)
    assert bed.copies("dropped") == 4
    assert not any(each.waiting for each in bed.serving.plans.watches.take_counts()), (
        "a cancelled copy does not wait any more"
    )


async def test_a_forwarded_request_is_counted_by_the_other_gateway(bed: ShadowBed) -> None:
    request = ask(MODEL, parameters={"session_id": "s", "seq_no": 1})
    plan, _ = ForwardedRequests(bed.serving)._plan(request, bed.serving.resolver.choose(request))
    assert plan.watch is not None
    assert not any(each.waiting for each in bed.serving.plans.watches.take_counts())
