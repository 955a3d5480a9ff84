"""Statistics in messages: all counts of a worker survive encoding."""

from penstock.core.generation import GenerationState
from penstock.core.statistics import BatchStatistics, BlockStatistics, Duration, merge_by_block
from penstock.wire.encodings import decode_statistics, encode_statistics

COUNTED = BlockStatistics(
    "blk",
    "m",
    "1",
    last_inference_ms=5,
    inference_count=6,
    execution_count=7,
    success=Duration(1, 100),
    fail=Duration(2, 200),
    queue=Duration(3, 300),
    compute_input=Duration(4, 400),
    compute_infer=Duration(5, 500),
    compute_output=Duration(6, 600),
    batches={8: BatchStatistics(Duration(1, 2), Duration(3, 4), Duration(5, 6)), 1: BatchStatistics()},
    closed={"rows": 3, "delay": 4},
    generation=GenerationState(1, 2, 30, 4, 5, 6, -1, 8, 9),
)


def test_all_counts_survive_encoding() -> None:
    frame = encode_statistics(9, [COUNTED, BlockStatistics("other", "m", "2")])
    assert frame.statistics.query_id == 9
    assert decode_statistics(frame.statistics) == [COUNTED, BlockStatistics("other", "m", "2")]


def test_a_sum_has_each_block_once() -> None:
    twice, other = merge_by_block([COUNTED, BlockStatistics("other", "m", "2"), COUNTED])
    assert other == BlockStatistics("other", "m", "2")
    assert (twice.last_inference_ms, twice.inference_count, twice.execution_count) == (5, 12, 14)
    assert (twice.success, twice.compute_output) == (Duration(2, 200), Duration(12, 1200))
    assert twice.batches[8].compute_infer == Duration(6, 8)
    assert twice.closed == {"rows": 6, "delay": 8}
    assert twice.generation == GenerationState(2, 4, 60, 8, 10, 12, -1, 16, 18)


def test_an_engine_without_prefix_counts_does_not_hide_those_of_others() -> None:
    told = BlockStatistics("blk", "m", "1", generation=GenerationState(cached_tokens=7))
    assert merge_by_block([told, COUNTED])[0].generation == GenerationState(1, 2, 30, 4, 5, 6, 7, 8, 9)


def test_a_former_worker_keeps_its_totals_and_loses_its_current_values() -> None:
    gone = BlockStatistics("blk", "m", "1", generation=GenerationState(1, 2, 30, 4, 5, 6, 7, 8, 9))
    gone.clear_current()
    assert gone.generation == GenerationState(0, 0, 0, 0, 5, 6, 7, 8, 9)
