"""Copies of requests: who gets them, what bounds them, and that their clients know nothing of them."""

import asyncio
from pathlib import Path

import pytest

from penstock.core.errors import EngineFailed
from penstock.core.requests import InferResponse, Timing
from penstock.core.routes import NameRoute, Share
from penstock.core.tensors import Tensor
from penstock.serving import shadows
from penstock.serving.forwarded import ForwardedRequests
from tests.unit.serving.test_serve import Bed, ask

MODEL, SHADOW = "plain", "kept"


class ShadowBed(Bed):
    def __init__(self, folder: Path, is_compared: bool = True) -> None:
        super().__init__(folder)
        self.resolver._draw = lambda: 0.0
        self.shadow_id = self.resolver.resolve(SHADOW, "").block_id
        old = self.resolver.resolve(MODEL, "").block_id
        route = NameRoute(MODEL, (Share(old, 1),), shadow=self.shadow_id, shadow_share=0.5, is_compared=is_compared)
        self.resolver.routes_changed([route])
        self.serving.plans.watch([route])

    def copies(self, outcome: str) -> float:
        labels = {"model": SHADOW, "version": "3", "outcome": outcome}
        return self.registry.get_sample_value("penstock_shadow_requests_total", labels) or 0.0

    async def settle(self) -> None:
        await asyncio.gather(*self.serving.shadows._tasks)

    def ran(self) -> list[str]:
        return [described.model for described, _, _ in self.dispatcher.ran]


@pytest.fixture
def bed(tmp_path: Path) -> ShadowBed:
    return ShadowBed(tmp_path)


async def test_an_answered_request_is_copied_without_its_controls(bed: ShadowBed) -> None:
    await bed.serving.serve(ask(MODEL, parameters={"temperature": 0.5, "priority": 1, "cache": "refresh"}))
    assert bed.ran() == [MODEL], "its client has its answer first"
    await bed.settle()
    assert bed.ran() == [MODEL, SHADOW]
    _, copy, _ = bed.dispatcher.ran[1]
    assert copy.parameters == {"temperature": 0.5}
    assert bed.copies("ok") == bed.copies("same") == 1
    counts = {each.block_id: each for each in bed.serving.plans.watches.take() if not each.is_control}
    assert counts[bed.shadow_id].answers == 1
    assert sum(counts[bed.shadow_id].latencies.values()) == 1
    assert bed.count(SHADOW, "ok") == 0, "it is no request of a client's"


async def test_a_copy_that_fails_is_counted_and_nobody_else_hears_of_it(bed: ShadowBed) -> None:
    bed.dispatcher.error, bed.dispatcher.failing = EngineFailed("no"), {bed.shadow_id}
    await bed.serving.serve(ask(MODEL))
    await bed.settle()
    assert (bed.copies("failed"), bed.copies("ok")) == (1, 0)
    (counts,) = [each for each in bed.serving.plans.watches.take() if each.errors and not each.is_control]
    assert counts.errors == {"engine_failed": 1}


async def test_other_outputs_are_told(bed: ShadowBed) -> None:
    given = InferResponse("", "", "", [Tensor("x", "UINT8", (1, 1), b"\7")], Timing(compute_ns=1))
    bed.serving.shadows.offer(ask(MODEL), given)
    await bed.settle()
    assert (bed.copies("different"), bed.copies("same")) == (1, 0)


async def test_only_the_name_is_copied_and_no_sessions(bed: ShadowBed) -> None:
    await bed.serving.serve(ask(MODEL, version="3"))
    await bed.serving.serve(ask(bed.resolver.resolve(MODEL, "").block_id))
    await bed.serving.serve(ask(MODEL, parameters={"session_id": "s"}))
    await bed.settle()
    assert bed.ran() == [MODEL] * 3


async def test_a_share_is_copied(bed: ShadowBed) -> None:
    split = bed.resolver.split(MODEL)
    assert split is not None
    split._draw = lambda: 0.6
    await bed.serving.serve(ask(MODEL))
    await bed.settle()
    assert bed.ran() == [MODEL]


async def test_copies_are_dropped_first(bed: ShadowBed, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not any(each.waiting for each in bed.serving.plans.watches.take()), "who is stopped waits no more"


async def test_what_another_gateway_sent_is_counted_there(bed: ShadowBed) -> None:
    request = ask(MODEL, parameters={"session_id": "s", "seq_no": 1})
    plan, _ = ForwardedRequests(bed.serving)._plan(request, bed.serving.resolver.choose(request))
    assert plan.watch is not None
    assert not any(each.waiting for each in bed.serving.plans.watches.take())
