"""The batcher: scripts of events with a fake clock."""

import random
from math import inf
from typing import Any

from penstock.core.settings import Batching
from penstock.worker.running.batcher import MAX_ANCHORED_IN_A_ROW, Batch, Batcher, CloseReason, QueuedPiece


def budget(
    max_rows: int, free_padding: int = 0, max_padding: float = 0.05, searched_tokens: int | None = None, **given: Any
) -> Batching:
    reach = property(lambda _: searched_tokens)
    constants = {"free_padding": free_padding, "max_padding": max_padding, "searched_tokens": reach}
    made: Batching = type("Budget", (Batching,), {"__module__": __name__} | constants)(max_rows=max_rows, **given)
    return made


def entry(
    owner: object,
    length: int = 1,
    rows: int = 1,
    key: object = "a",
    deadline: float = 1e9,
    level: int = 1,
    queue_deadline: float = inf,
) -> QueuedPiece:
    return QueuedPiece(owner, 0, rows, length, key, deadline, level, queue_deadline)


def owners(batch: Batch | None) -> list[object]:
    return [] if batch is None else [found.owner for found in batch.entries]


def lengths(batch: Batch | None) -> list[int]:
    assert batch is not None
    return sorted(e.length for e in batch.entries)


def test_without_waiting_pieces_there_is_no_batch() -> None:
    assert Batcher(budget(8)).next_batch(0.0) is None


def test_an_idle_instance_takes_what_waits() -> None:
    batcher = Batcher(budget(8))
    batcher.append([entry("j")], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert batch.closed is CloseReason.EMPTY
    assert len(batcher) == 0


def test_a_request_of_many_pieces_lets_others_in_between() -> None:
    batcher = Batcher(budget(4))
    large, small = object(), object()
    batcher.append([entry(large) for _ in range(400)], 0.0)
    for _ in range(MAX_ANCHORED_IN_A_ROW):
        assert set(owners(batcher.next_batch(0.0))) == {large}
    batcher.append([entry(small)], 1.0)
    batches = [owners(batcher.next_batch(1.0)) for _ in range(2)]
    assert sum(batch.count(small) for batch in batches) == 1, "the small request does not wait for all of the large one"
    while len(batcher):
        assert owners(batcher.next_batch(2.0))


def test_a_piece_that_runs_between_those_of_another_request_runs_once() -> None:
    rng = random.Random(3)
    for some in (budget(4), budget(4, max_padding=0.25), budget(8, max_tokens=60, max_padding=0.25)):
        batcher, large = Batcher(some), object()
        waiting = [entry(large, length=rng.choice((7, 8, 9))) for _ in range(200)]
        waiting += [entry(object(), length=rng.choice((7, 8, 9)), level=rng.choice((1, 2))) for _ in range(200)]
        batcher.append(waiting, 0.0)
        taken: list[QueuedPiece] = []
        while (batch := batcher.next_batch(0.0)) is not None:
            taken += batch.entries
        assert len(taken) == len(waiting)
        assert {id(piece) for piece in taken} == {id(piece) for piece in waiting}


def test_requests_of_few_pieces_are_served_one_after_the_other() -> None:
    batcher = Batcher(budget(4))
    first, second = object(), object()
    batcher.append([entry(first) for _ in range(4 * MAX_ANCHORED_IN_A_ROW)], 0.0)
    batcher.append([entry(second) for _ in range(4 * MAX_ANCHORED_IN_A_ROW)], 0.0)
    served = [set(owners(batcher.next_batch(0.0))) for _ in range(2 * MAX_ANCHORED_IN_A_ROW)]
    assert served == [{first}] * MAX_ANCHORED_IN_A_ROW + [{second}] * MAX_ANCHORED_IN_A_ROW


def test_a_batch_closes_at_its_rows() -> None:
    batcher = Batcher(budget(4))
    batcher.append([entry(i) for i in range(6)], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert (batch.rows, batch.closed) == (4, CloseReason.ROWS)
    assert len(batcher) == 2


def test_a_batch_closes_at_its_tokens() -> None:
    batcher = Batcher(budget(32, max_tokens=100))
    batcher.append([entry(i, length=30) for i in range(6)], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert (batch.rows, batch.padded_tokens, batch.closed) == (3, 90, CloseReason.TOKENS)


def test_a_piece_over_the_token_budget_runs_alone() -> None:
    batcher = Batcher(budget(32, max_tokens=100))
    batcher.append([entry(1, length=300), entry(2, length=300)], 0.0)
    assert lengths(batcher.next_batch(0.0)) == [300]


def test_the_oldest_piece_starts_a_batch_and_the_nearest_lengths_fill_it() -> None:
    batcher = Batcher(budget(3, max_padding=0.25))
    batcher.append([entry(1, 50), entry(2, 10), entry(3, 52), entry(4, 9), entry(5, 48)], 0.0)
    assert lengths(batcher.next_batch(0.0)) == [48, 50, 52]
    assert lengths(batcher.next_batch(0.0)) == [9, 10]


def test_padding_is_limited_and_a_refusal_ends_only_its_direction() -> None:
    batcher = Batcher(budget(8, max_padding=0.25))
    batcher.append([entry(1, 40), entry(2, 30), entry(3, 20), entry(4, 52)], 0.0)
    batch = batcher.next_batch(0.0)
    assert lengths(batch) == [30, 40]
    assert batch is not None
    assert batch.closed is CloseReason.PADDING
    real = sum(e.length for e in batch.entries)
    assert batch.padded_tokens <= real * 1.25


def test_padding_below_the_free_amount_is_allowed() -> None:
    strict, lenient = Batcher(budget(8, max_padding=0.05)), Batcher(budget(8, max_padding=0.05, free_padding=8))
    for batcher in (strict, lenient):
        batcher.append([entry(1, 10), entry(2, 6), entry(3, 2)], 0.0)
    assert lengths(strict.next_batch(0.0)) == [10]
    assert lengths(lenient.next_batch(0.0)) == [6, 10]


def test_a_long_piece_is_served_while_short_ones_keep_arriving() -> None:
    batcher = Batcher(budget(8, max_tokens=256))
    rng = random.Random(1)
    batcher.append([entry("long", 250)], 0.0)
    for step in range(3):
        batcher.append([entry((step, i), rng.randint(4, 12)) for i in range(20)], float(step))
    assert lengths(batcher.next_batch(3.0)) == [250]


def test_the_oldest_is_always_in_the_batch() -> None:
    rng = random.Random(7)
    batcher = Batcher(budget(8, max_tokens=512))
    alive: list[int] = []
    for number in range(400):
        batcher.append([entry(number, rng.randint(3, 250), key=rng.choice("ab"))], float(number))
        alive.append(number)
        if rng.random() < 0.3 and (batch := batcher.next_batch(float(number))):
            owners = [e.owner for e in batch.entries]
            assert alive[0] in owners
            alive = [n for n in alive if n not in owners]
    while batch := batcher.next_batch(1e6):
        assert alive[0] in [e.owner for e in batch.entries]
        alive = [n for n in alive if n not in {e.owner for e in batch.entries}]
    assert alive == []


def test_incompatible_shapes_are_never_joined() -> None:
    batcher = Batcher(budget(8))
    batcher.append([entry(1, key=(3, 4)), entry(2, key=(3, 5)), entry(3, key=(3, 4))], 0.0)
    first = batcher.next_batch(0.0)
    assert first is not None
    assert [e.owner for e in first.entries] == [1, 3]


def test_a_batch_waits_for_others_only_until_the_oldest_pieces_delay() -> None:
    batcher = Batcher(budget(4, max_delay_ms=10))
    batcher.append([entry(1)], 1.000)
    assert batcher.next_batch(1.005) is None
    assert batcher.wake_at() == 1.010
    batcher.append([entry(2)], 1.008)
    assert batcher.wake_at() == 1.010
    batch = batcher.next_batch(1.010)
    assert batch is not None
    assert (batch.rows, batch.closed) == (2, CloseReason.DELAY)


def test_a_full_batch_does_not_wait() -> None:
    batcher = Batcher(budget(2, max_delay_ms=10000))
    batcher.append([entry(1), entry(2)], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert batch.closed is CloseReason.ROWS


def test_expired_and_cancelled_pieces_are_removed_before_the_batch_forms() -> None:
    batcher = Batcher(budget(8))
    late, gone = entry("late", deadline=1.0), entry("gone")
    batcher.append([late, gone, entry("here")], 0.0)
    assert [e.owner for e in batcher.expire(2.0)] == ["late"]
    batcher.remove([late, gone])  # one of which was removed already
    assert len(batcher) == 1
    batch = batcher.next_batch(2.0)
    assert batch is not None
    assert [e.owner for e in batch.entries] == ["here"]


def test_arrival_order_pads_to_the_longest() -> None:
    batcher = Batcher(budget(3, order="arrival"))
    batcher.append([entry(1, 5), entry(2, 200), entry(3, 7), entry(4, 5)], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert [e.owner for e in batch.entries] == [1, 2, 3]
    assert batch.padded_tokens == 600


def test_rows_of_one_request_stay_together() -> None:
    batcher = Batcher(budget(8))
    batcher.append([entry(1, rows=5), entry(2, rows=5), entry(3, rows=3)], 0.0)
    first = batcher.next_batch(0.0)
    assert first is not None
    assert first.rows <= 8
    assert sum(e.rows for e in first.entries) == first.rows


def test_only_pieces_near_the_front_of_the_queue_fill() -> None:
    batcher = Batcher(budget(8, max_tokens=256, searched_tokens=100))
    batcher.append([entry("old", 40), entry("other", 60), entry("young", 40)], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert [found.owner for found in batch.entries] == ["old"]
    # Pieces from behind have moved to the front.
    assert lengths(batcher.next_batch(0.0)) == [60]
    assert lengths(batcher.next_batch(0.0)) == [40]


def test_pieces_out_of_reach_do_not_end_the_search() -> None:
    batcher = Batcher(budget(8, max_tokens=256, max_padding=0.25, searched_tokens=31))
    batcher.append([entry("anchor", 10), entry("like", 11), entry("far", 10), entry("further", 10)], 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert [found.owner for found in batch.entries] == ["anchor", "far", "like"]


def test_few_waiting_pieces_are_divided_among_instances() -> None:
    batcher = Batcher(budget(32, max_tokens=400), share=0.25)
    batcher.append([entry(i, 50) for i in range(8)], 0.0)
    assert lengths(batcher.next_batch(0.0)) == [50, 50]  # a quarter of 400
    batcher.append([entry(i, 50) for i in range(8, 40)], 0.0)
    assert lengths(batcher.next_batch(0.0)) == [50] * 8  # a quarter of 1,900, but no more than the budget
    while batcher.tokens > 100:
        batch = batcher.next_batch(0.0)
        assert batch is not None
        assert batch.padded_tokens >= 100  # a quarter of the budget is always allowed
    assert batcher.tokens == 50 * len(batcher)


def test_waiting_tokens_are_counted() -> None:
    batcher = Batcher(budget(8, max_tokens=100))
    leaving = entry("a", 10, rows=2)
    batcher.append([leaving, entry("b", 5), entry("c", 7, deadline=1.0)], 0.0)
    assert batcher.tokens == 32
    batcher.remove([leaving])
    assert batcher.tokens == 12
    batcher.expire(2.0)
    assert batcher.tokens == 5
    batcher.next_batch(0.0)
    assert batcher.tokens == 0


def test_a_higher_level_overtakes_and_lower_ones_fill_what_it_leaves() -> None:
    batcher = Batcher(budget(4))
    batcher.append([entry(f"low{n}", level=3) for n in range(3)], 0.0)
    batcher.append([entry(f"middle{n}", level=2) for n in range(2)], 1.0)
    batcher.append([entry("high", level=1)], 2.0)
    assert owners(batcher.next_batch(2.0)) == ["high", "middle0", "middle1", "low0"]
    assert owners(batcher.next_batch(2.0)) == ["low1", "low2"]
    assert len(batcher) == batcher.tokens == 0


def test_lower_levels_fill_only_with_compatible_pieces() -> None:
    batcher = Batcher(budget(8, max_padding=0.05))
    batcher.append([entry("far", 90, level=2), entry("near", 51, level=2), entry("other", 50, key="b", level=2)], 0.0)
    batcher.append([entry("high", 50)], 0.0)
    assert owners(batcher.next_batch(0.0)) == ["high", "near"]
    assert owners(batcher.next_batch(0.0)) == ["far"]
    assert owners(batcher.next_batch(0.0)) == ["other"]


def test_lower_levels_fill_in_order_of_arrival_too() -> None:
    batcher = Batcher(budget(3, order="arrival"))
    batcher.append([entry("low", level=2), entry("lower", level=3)], 0.0)
    batcher.append([entry("high")], 0.0)
    assert owners(batcher.next_batch(0.0)) == ["high", "low", "lower"]


def test_the_reach_extends_from_the_highest_level_down() -> None:
    batcher = Batcher(budget(8, max_padding=1.0, searched_tokens=25))
    batcher.append([entry(f"low{n}", 10, level=2) for n in range(4)], 0.0)
    batcher.append([entry("high", 10)], 0.0)
    assert owners(batcher.next_batch(0.0)) == ["high", "low0", "low1"]


def test_within_a_level_the_oldest_is_first_and_a_lower_level_gets_the_remainder() -> None:
    """The rule: no starvation within a level, and no promise across levels."""
    batcher = Batcher(budget(2))
    batcher.append([entry("low", level=2)], 0.0)
    for step in range(50):
        batcher.append([entry((step, 0)), entry((step, 1))], float(step))
        assert owners(batcher.next_batch(float(step))) == [(step, 0), (step, 1)]
    batcher.append([entry("last")], 50.0)
    assert owners(batcher.next_batch(50.0)) == ["last", "low"]


def test_a_single_level_makes_the_same_batches_whatever_its_number() -> None:
    rng = random.Random(3)
    plain, other = (Batcher(budget(8, max_tokens=512, searched_tokens=900), share=0.25) for _ in range(2))
    for number in range(500):
        length, key = rng.randint(3, 250), rng.choice("ab")
        plain.append([entry(number, length, key=key)], float(number))
        other.append([entry(number, length, key=key, level=7)], float(number))
        if rng.random() < 0.3:
            batch, same = plain.next_batch(float(number)), other.next_batch(float(number))
            assert batch is not None
            assert same is not None
            assert owners(batch) == owners(same)
            assert (batch.closed, batch.rows, batch.real_tokens) == (same.closed, same.rows, same.real_tokens)
            assert batch.real_tokens == sum(found.length for found in batch.entries)


def test_a_rejecting_level_gives_up_pieces_that_waited_too_long() -> None:
    batcher = Batcher(budget(8))
    batcher.append([entry("patient", queue_deadline=5.0), entry("hasty", queue_deadline=1.0), entry("any")], 0.0)
    assert batcher.due == 1.0
    assert batcher.expire(0.9) == []
    assert [found.owner for found in batcher.expire(1.0)] == ["hasty"]
    assert batcher.due == 5.0
    assert owners(batcher.next_batch(2.0)) == ["patient", "any"]


def test_a_delaying_level_serves_delayed_pieces_when_its_others_are_done() -> None:
    batcher = Batcher(budget(1), delaying=[2])
    batcher.append([entry("first", level=2, queue_deadline=1.0), entry("second", level=2, queue_deadline=1.0)], 0.0)
    assert batcher.expire(1.0) == []
    batcher.append([entry("young", level=2, queue_deadline=9.0)], 1.0)
    batcher.append([entry("high", level=1, queue_deadline=9.0)], 1.0)
    assert [owners(batcher.next_batch(2.0)) for _ in range(4)] == [["high"], ["young"], ["first"], ["second"]]


def test_delayed_pieces_are_delayed_once_keep_their_deadline_and_still_fill() -> None:
    batcher = Batcher(budget(2), delaying=[1])
    batcher.append([entry("slow", queue_deadline=1.0, deadline=3.0), entry("late", queue_deadline=1.0)], 0.0)
    batcher.expire(1.0)
    assert batcher.due == 3.0
    batcher.append([entry("young")], 1.0)
    assert batcher.expire(2.0) == []
    assert [found.owner for found in batcher.expire(3.0)] == ["slow"]
    batch = batcher.next_batch(3.0)
    assert owners(batch) == ["young", "late"]
    assert batch is not None
    assert [found.arrived for found in batch.entries] == [1.0, 0.0]  # delaying is not a new arrival


def test_a_started_request_is_exempt_from_its_queue_timeout() -> None:
    batcher = Batcher(budget(1))
    begun = [entry("a", queue_deadline=1.0), entry("a", queue_deadline=1.0)]
    batcher.append([*begun, entry("b", queue_deadline=1.0)], 0.0)
    batcher.next_batch(0.0)
    batcher.remove_queue_deadline(begun)
    assert [found.owner for found in batcher.expire(2.0)] == ["b"]
    assert owners(batcher.next_batch(2.0)) == ["a"]


def test_nothing_is_due_before_the_reported_time() -> None:
    batcher = Batcher(budget(1))
    assert batcher.due == inf
    batcher.append([entry("soon", deadline=1.0), entry("later", deadline=2.0)], 0.0)
    batcher.next_batch(0.0)
    assert batcher.due == 1.0
    assert batcher.expire(1.0) == []
    assert batcher.due == 2.0
    batcher.append([entry("sooner", deadline=1.5)], 1.0)
    assert batcher.due == 1.5
    batcher.expire(2.0)
    assert batcher.due == inf


def test_a_newer_piece_of_a_higher_level_does_not_delay_an_older_one_again() -> None:
    batcher = Batcher(budget(4, max_delay_ms=10))
    batcher.append([entry("low", key="b", level=2)], 1.000)
    batcher.append([entry("high")], 1.009)
    assert batcher.wake_at() == 1.010
    assert batcher.next_batch(1.009) is None
    batch = batcher.next_batch(1.010)
    assert batch is not None
    assert (owners(batch), batch.closed) == (["high"], CloseReason.DELAY)
    assert owners(batcher.next_batch(1.010)) == ["low"]


def test_delayed_pieces_are_ordered_behind_every_level_and_by_level() -> None:
    batcher = Batcher(budget(1), delaying=[1, 2])
    batcher.append([entry("slow2", level=2, queue_deadline=1.0), entry("slow1", level=1, queue_deadline=1.0)], 0.0)
    batcher.expire(1.0)
    batcher.append([entry("low", level=1000), entry("high", level=1)], 1.0)
    assert [owners(batcher.next_batch(2.0)) for _ in range(4)] == [["high"], ["low"], ["slow1"], ["slow2"]]


def test_padding_within_a_piece_is_counted_but_refuses_no_others() -> None:
    batcher = Batcher(budget(64, max_padding=0.0))
    pieces = [entry("a", 16, rows=4), entry("b", 16, rows=2), entry("c", 32, rows=2)]
    pieces[0].padding, pieces[1].padding = 30, 5
    batcher.append(pieces, 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None
    assert owners(batch) == ["a", "b"]
    assert (batch.padded_tokens, batch.real_tokens) == (96, 61)


def test_a_request_of_many_rows_is_served_in_parts_and_lets_others_in_between() -> None:
    """As text tasks split it: a thousand long texts become pieces of at most a quarter of a batch."""
    batcher = Batcher(budget(1024, max_tokens=65_536, max_padding=0.1), share=0.25)
    batcher.append([entry("large", 256, rows=64) for _ in range(128)], 0.0)
    batcher.append([entry("other", 16, rows=8)], 0.0)
    served: list[set[object]] = []
    while len(batcher):
        batch = batcher.next_batch(0.0)
        assert batch is not None
        assert batch.padded_tokens <= 65_536
        served.append(set(owners(batch)))
    assert served.index({"other"}) == MAX_ANCHORED_IN_A_ROW
