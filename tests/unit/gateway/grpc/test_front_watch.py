"""Who has to go so that what the native front holds stays within bounds: decided by what the kernel counts."""

from penstock.core.config import Limits
from penstock.gateway.grpc.front_watch import CALL_BYTES, FrontWatch
from penstock.wire.tcp_connections import ConnectionCounts

A, B, C = "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "ipv4:127.0.0.1:3"
MAX = 1_000_000


def watch_of(max_connections: int = 10) -> FrontWatch:
    return FrontWatch(Limits(message_timeout_s=300, header_timeout_s=20), MAX, max_connections, idle_s=900)


def counts(received: int, taken: int = 0, silent_s: float = 0.0) -> ConnectionCounts:
    return ConnectionCounts(received, taken, silent_s)


def test_messages_that_are_whole_are_not_held() -> None:
    watch = watch_of()
    watch.whole_bytes[A] = 10 * MAX + CALL_BYTES
    assert not watch.look({A: counts(10 * MAX + 200)}, unseen=1, now=0)


def test_of_whom_most_is_held_goes_until_half_is_left() -> None:
    watch = watch_of()
    held = {A: counts(600_000), B: counts(300_000), C: counts(200_000)}
    assert watch.look(held, unseen=3, now=0) == {A}


def test_where_the_front_has_no_call_nothing_is_held() -> None:
    """As of streams, which go on to the server behind it."""
    watch = watch_of()
    assert not watch.look({A: counts(10 * MAX)}, unseen=0, now=0)
    assert not watch.look({A: counts(10 * MAX + 1000)}, unseen=1, now=1)
    assert watch.look({A: counts(12 * MAX)}, unseen=1, now=2) == {A}


def test_who_comes_last_goes_where_there_are_too_many() -> None:
    watch = watch_of(max_connections=2)
    assert not watch.look({A: counts(100), B: counts(100)}, unseen=0, now=0)
    assert watch.look({C: counts(100), A: counts(100), B: counts(100)}, unseen=0, now=1) == {C}


def test_who_never_begins_and_who_is_silent_for_long_goes() -> None:
    watch = watch_of()
    assert not watch.look({A: counts(0), B: counts(100)}, unseen=0, now=0)
    assert watch.look({A: counts(0, silent_s=21), B: counts(100, silent_s=21)}, unseen=0, now=21) == {A}
    assert watch.look({B: counts(100, silent_s=901)}, unseen=0, now=901) == {B}


def test_a_message_that_does_not_go_on_ends_its_connection() -> None:
    """Answers to pings are no going on."""
    watch = watch_of()
    assert not watch.look({A: counts(1000), B: counts(1000)}, unseen=2, now=0)
    assert not watch.look({A: counts(1017), B: counts(2000)}, unseen=2, now=200)
    assert watch.look({A: counts(1034), B: counts(2017)}, unseen=2, now=301) == {A}


def test_an_answer_counts_until_its_client_has_taken_it_or_is_gone() -> None:
    watch, taken = watch_of(), []
    watch.look({A: counts(100, 50), B: counts(100)}, unseen=0, now=0)
    watch.answered(A, 1000, lambda: taken.append("first"))
    watch.answered(A, 1000, lambda: taken.append("second"))
    watch.answered(B, 1000, lambda: taken.append("of B"))
    assert watch.is_waiting
    watch.look({A: counts(100, 1100), B: counts(100)}, unseen=0, now=1)
    assert taken == ["first"]
    watch.look({A: counts(100, 2100)}, unseen=0, now=2)
    assert sorted(taken) == ["first", "of B", "second"]
    assert not watch.is_waiting


def test_an_answer_to_somebody_who_left_is_taken_at_once() -> None:
    taken: list[str] = []
    watch_of().answered(A, 1000, lambda: taken.append("gone"))
    assert taken == ["gone"]
