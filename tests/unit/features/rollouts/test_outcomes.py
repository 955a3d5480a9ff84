"""Outcome counts of blocks that routes name."""

import pytest

from penstock.core.cluster.answer_counts import AnswerCounts, compute_quantile_s, compute_upper_bound_s, find_bucket
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.errors import Cancelled, EngineFailed, RateLimited
from penstock.core.requests import InferRequest, InferResponse, Timing
from penstock.features.rollouts.outcomes import BlockWatch, BlockWatches


def request() -> InferRequest:
    return InferRequest("m", [])


def response(compute_ns: int = 1) -> InferResponse:
    return InferResponse("m", "1", "", [], Timing(compute_ns=compute_ns))


def test_buckets_contain_the_values_between_their_bounds() -> None:
    for seconds in (0.00001, 0.0001, 0.00013, 0.003, 0.25, 7.0, 80.0):
        bucket = find_bucket(seconds)
        assert seconds <= compute_upper_bound_s(bucket) * 1.0001
        assert bucket == 0 or seconds >= compute_upper_bound_s(bucket - 1) * 0.9999
    assert find_bucket(1e9) == find_bucket(1e6)


def test_quantiles_are_close_to_the_exact_ones() -> None:
    latencies: dict[int, int] = {}
    for number in range(1, 1001):
        bucket = find_bucket(number / 1000)
        latencies[bucket] = latencies.get(bucket, 0) + 1
    for share in (0.5, 0.95):
        found = compute_quantile_s(latencies, share)
        assert found is not None
        assert abs(found - share) < 0.1 * share
    assert compute_quantile_s({}, 0.5) is None


def test_outcomes_are_counted_and_taken_once() -> None:
    watch = BlockWatch("blk-1")
    asked = [request() for _ in range(6)]
    for each in asked:
        watch.begin_request(each)
    watch.count_error(asked[5], RateLimited("wait"))
    watch.count_answer(asked[0], response(), 0.003)
    watch.count_answer(asked[1], response(compute_ns=0), 0.000_02)
    watch.count_error(asked[2], EngineFailed("no"))
    watch.count_error(asked[3], Cancelled("left"))
    (counts,) = watch.take_counts(0.0)
    assert (counts.answers, counts.errors, counts.latencies) == (2, {"engine_failed": 1}, {find_bucket(0.003): 1})
    assert sum(counts.waiting.values()) == 1
    watch.end_request(asked[4])
    assert watch.take_counts(0.0) == [AnswerCounts("blk-1")]


def test_waiting_requests_are_reported_by_age() -> None:
    watch = BlockWatch("blk-1")
    asked = request()
    watch.begin_request(asked)
    (counts,) = watch.take_counts(1e9)
    (bucket,) = counts.waiting
    assert bucket == find_bucket(1e9)


def routed(*block_ids: str) -> NameRoute:
    return NameRoute("m", tuple(BlockShare(block_id, 1) for block_id in block_ids))


def test_counts_continue_for_blocks_that_stay_watched() -> None:
    watches = BlockWatches()
    assert watches.watch([routed("a", "b")])
    first = watches.get_watch("a")
    assert not watches.watch([routed("b", "a")])
    assert watches.watch([routed("a")])
    assert watches.get_watch("a") is first
    assert watches.get_watch("b") is None
    assert [counts.block_id for counts in watches.take_counts()] == ["a"]


def test_requests_right_after_one_for_the_other_block_are_also_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("penstock.features.rollouts.outcomes.now", lambda: clock[0])
    watches = BlockWatches()
    watches.watch([routed("old", "new")])
    old, new = watches.get_watch("old"), watches.get_watch("new")
    assert old is not None
    assert new is not None
    asked = [request() for _ in range(3)]
    old.begin_request(asked[0])  # before any
    new.begin_request(request())
    clock[0] = 0.1
    old.begin_request(asked[1])
    clock[0] = 5.0
    old.begin_request(asked[2])  # long after
    for each in asked:
        old.count_answer(each, response(), 0.003)
    found = {(counts.block_id, counts.is_control): counts.answers for counts in watches.take_counts()}
    assert found == {("old", False): 3, ("old", True): 1, ("new", False): 0, ("new", True): 0}
