"""Plans of blocks: built once, and again when the block or its routing changes."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.errors import EngineFailed
from penstock.core.principals import Principal
from penstock.core.requests import Controls, InferRequest, InferResponse, Parameter, Timing
from penstock.core.settings import BlockSettings, Routing
from penstock.serving.plans import PROTOCOLS, Plan, Plans
from penstock.telemetry.metrics import ServingMetrics


def block(block_id: str = "blk-1", **settings: Any) -> BlockDescription:
    return BlockDescription(
        block_id, "m", "1", "onnxruntime_onnx", "fp32", (), (), 8, 1, BlockSettings(**settings), fingerprint="f"
    )


def read(plan: Plan, **parameters: Parameter) -> Controls:
    request = InferRequest("m", [], parameters=parameters)
    plan.read_controls(request)
    return request.controls


class Bed:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.routings: dict[str, Routing] = {}
        self.plans = Plans(ServingMetrics(self.registry), self.routing)

    def routing(self, described: BlockDescription) -> Routing:
        return self.routings.get(described.block_id, described.settings.routing)

    def sample(self, name: str, **labels: str) -> float | None:
        self.plans.tallies.flush()
        return self.registry.get_sample_value(name, {"model": "m", "version": "1", **labels})


@pytest.fixture
def bed() -> Bed:
    return Bed()


@pytest.mark.parametrize(
    ("settings", "is_cached", "is_decoupled"),
    [
        ({}, False, False),
        ({"cache": {"enabled": True}}, True, False),
        ({"is_decoupled": True}, False, True),
    ],
)
def test_a_plan_contains_the_settings_of_its_block(
    bed: Bed, settings: dict[str, Any], is_cached: bool, is_decoupled: bool
) -> None:
    plan = bed.plans.find_plan(block(timeouts={"request_s": 4.0}, **settings))
    assert (plan.is_cached, plan.is_decoupled) == (is_cached, is_decoupled)
    assert plan.read_controls(InferRequest("m", [])) == 4.0


def test_a_plan_is_built_once(bed: Bed) -> None:
    one, other = block(), block("blk-2")
    assert bed.plans.find_plan(one) is bed.plans.find_plan(one)
    assert bed.plans.find_plan(other) is not bed.plans.find_plan(one)


def test_a_changed_description_of_the_block_makes_a_new_plan(bed: Bed) -> None:
    first = bed.plans.find_plan(block(timeouts={"request_s": 4.0}))
    changed = block(timeouts={"request_s": 5.0})
    second = bed.plans.find_plan(changed)
    assert [plan.read_controls(InferRequest("m", [])) for plan in (first, second)] == [4.0, 5.0]
    assert bed.plans.find_plan(changed) is second


def test_a_plan_reads_its_blocks_controls(bed: Bed) -> None:
    described = block(
        priorities={"levels": 2, "default": 2}, routing={"policy": "hash", "key": "user", "without_key": "any"}
    )
    assert read(bed.plans.find_plan(described), user="ann") == Controls(priority=2, shard_key="ann")
    assert read(bed.plans.find_plan(described)) == Controls(priority=2)


def test_a_changed_routing_makes_a_new_plan_for_its_model_only(bed: Bed) -> None:
    described, other = block(), block("blk-2")
    plan, kept = bed.plans.find_plan(described), bed.plans.find_plan(other)
    assert read(plan, user="ann").shard_key == ""
    bed.plans.drop_plans()
    assert bed.plans.find_plan(described) is plan
    bed.routings["blk-1"] = Routing(policy="hash", key="user")
    assert bed.plans.find_plan(described) is plan, "the routing has not changed yet"
    bed.plans.drop_plans()
    assert read(bed.plans.find_plan(described), user="ann").shard_key == "ann"
    assert bed.plans.find_plan(other) is kept


def test_counts_continue_over_plans(bed: Bed) -> None:
    described = block()
    for plan in (bed.plans.find_plan(described), bed.plans.find_plan(replace(described, instances=2))):
        plan.count_answer(InferRequest("m", []), 1.0, 1.5, 2.5, InferResponse("m", "1", "", [], Timing()))
    assert bed.sample("penstock_requests_total", protocol="grpc", code="ok") == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_is_counted_by_its_protocol(bed: Bed, protocol: str) -> None:
    bed.plans.find_plan(block()).count_answer(
        InferRequest("m", [], protocol=protocol), 1.0, 1.5, 2.5, InferResponse("m", "1", "", [], Timing())
    )
    counts = {name: bed.sample("penstock_requests_total", protocol=name, code="ok") for name in PROTOCOLS}
    assert counts == {**dict.fromkeys(PROTOCOLS, 0.0), protocol: 1.0}


@pytest.mark.parametrize(("worker_s", "reply_s"), [(0.75, 0.25), (3.0, 0.0)])
def test_the_workers_time_does_not_count_as_transport(bed: Bed, worker_s: float, reply_s: float) -> None:
    part_ns = int(worker_s * 1e9) // 4
    timing = Timing(queue_ns=part_ns, batch_ns=part_ns, compute_ns=part_ns, finish_ns=part_ns)
    bed.plans.find_plan(block()).count_answer(
        InferRequest("m", []), 1.0, 1.5, 2.5, InferResponse("m", "1", "", [], timing)
    )
    sums = [bed.sample(f"penstock_{name}_seconds_sum") for name in ("request", "admit", "reply")]
    assert sums == [1.5, 0.5, pytest.approx(reply_s)]


def test_blocks_in_routes_are_watched(bed: Bed) -> None:
    described = block()
    plain = bed.plans.find_plan(described)
    assert plain.watch is None
    bed.plans.watch([NameRoute("m", (BlockShare("blk-1", 1),))])
    watched = bed.plans.find_plan(described)
    assert watched.watch is not None
    answered, failed = InferRequest("m", []), InferRequest("m", [])
    assert (watched.read_controls(answered), watched.read_controls(failed)) == (30.0, 30.0)
    watched.count_answer(answered, 1.0, 1.5, 2.5, InferResponse("m", "1", "", [], Timing(compute_ns=1)))
    watched.watch.count_error(failed, EngineFailed("no"))
    (counts,) = bed.plans.watches.take_counts()
    assert (counts.answers, counts.errors, sum(counts.latencies.values())) == (1, {"engine_failed": 1}, 1)
    assert bed.sample("penstock_requests_total", protocol="grpc", code="ok") == 1
    bed.plans.watch([])
    assert bed.plans.find_plan(described).watch is None


def test_sessions_of_different_keys_differ(bed: Bed) -> None:
    both: list[dict[str, Any]] = [{}, {"sessions": {"order": True}}]
    for settings in both:
        plan = bed.plans.find_plan(block(**settings))
        found: list[str] = []
        for key_id in ("", "k1", "k2"):
            request = InferRequest("m", [], parameters={"session_id": "s"}, principal=Principal("name", key_id))
            plan.read_controls(request)
            plan.read_controls(request)  # as if its block was withdrawn
            assert request.controls.session is not None
            found.append(request.controls.session.session_id)
        assert found == ["s", "k1:s", "k2:s"]
