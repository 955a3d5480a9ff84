"""The choice of connections to cut so that the native server's memory stays within limits."""

from penstock.core.config import Limits
from penstock.gateway.native_grpc.native_limits import MAX_CALL_BYTES, NativeLimits
from penstock.wire.tcp_connections import ConnectionCounts

A, B, C = "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "ipv4:127.0.0.1:3"
MAX = 1_000_000


def watch_of(max_connections: int = 10) -> NativeLimits:
    return NativeLimits(Limits(message_timeout_s=300, header_timeout_s=20), MAX, max_connections, idle_s=900)


def counts(received: int, taken: int = 0, silent_s: float = 0.0) -> ConnectionCounts:
    return ConnectionCounts(received, taken, silent_s)


def test_whole_messages_are_not_held() -> None:
    watch = watch_of()
    watch.whole_bytes[A] = 10 * MAX + MAX_CALL_BYTES
    assert not watch.check({A: counts(10 * MAX + 200)}, undelivered=1, now=0)


def test_connections_that_hold_most_are_cut_until_half_is_left() -> None:
    watch = watch_of()
    held = {A: counts(600_000), B: counts(300_000), C: counts(200_000)}
    assert watch.check(held, undelivered=3, now=0) == {A}


def test_without_undelivered_calls_nothing_is_held() -> None:
    """For example the bytes of streams, which the native server forwards to grpcio."""
    watch = watch_of()
    assert not watch.check({A: counts(10 * MAX)}, undelivered=0, now=0)
    assert not watch.check({A: counts(10 * MAX + 1000)}, undelivered=1, now=1)
    assert watch.check({A: counts(12 * MAX)}, undelivered=1, now=2) == {A}


def test_the_newest_connections_beyond_the_limit_are_cut() -> None:
    watch = watch_of(max_connections=2)
    assert not watch.check({A: counts(100), B: counts(100)}, undelivered=0, now=0)
    assert watch.check({C: counts(100), A: counts(100), B: counts(100)}, undelivered=0, now=1) == {C}


def test_connections_without_preface_or_long_silent_are_cut() -> None:
    watch = watch_of()
    assert not watch.check({A: counts(0), B: counts(100)}, undelivered=0, now=0)
    assert watch.check({A: counts(0, silent_s=21), B: counts(100, silent_s=21)}, undelivered=0, now=21) == {A}
    assert watch.check({B: counts(100, silent_s=901)}, undelivered=0, now=901) == {B}


def test_a_stalled_message_cuts_its_connection() -> None:
    """Answers to pings do not count as progress."""
    watch = watch_of()
    assert not watch.check({A: counts(1000), B: counts(1000)}, undelivered=2, now=0)
    assert not watch.check({A: counts(1017), B: counts(2000)}, undelivered=2, now=200)
    assert watch.check({A: counts(1034), B: counts(2017)}, undelivered=2, now=301) == {A}


def test_an_answer_counts_until_it_is_read_or_its_client_is_gone() -> None:
    watch, taken = watch_of(), []
    watch.check({A: counts(100, 50), B: counts(100)}, undelivered=0, now=0)
    watch.track_answer(A, 1000, lambda: taken.append("first"))
    watch.track_answer(A, 1000, lambda: taken.append("second"))
    watch.track_answer(B, 1000, lambda: taken.append("of B"))
    assert watch.is_waiting
    watch.check({A: counts(100, 1100), B: counts(100)}, undelivered=0, now=1)
    assert taken == ["first"]
    watch.check({A: counts(100, 2100)}, undelivered=0, now=2)
    assert sorted(taken) == ["first", "of B", "second"]
    assert not watch.is_waiting


def test_an_answer_to_a_disconnected_client_is_released_at_once() -> None:
    taken: list[str] = []
    watch_of().track_answer(A, 1000, lambda: taken.append("gone"))
    assert taken == ["gone"]
