"""The connections that are cut when compressed headers fill a gRPC server's memory."""

from penstock.wire.grpc_listener.header_memory import (
    CALL_BYTES,
    FRAME_BYTES,
    GROWTH_BYTES,
    LARGE_BYTES,
    LARGE_GROWTH_BYTES,
    WINDOW_S,
    ArrivedMessages,
    HeaderMemory,
    Traffic,
)

MIB = 1024 * 1024
HELD = 100 * MIB


def test_connections_whose_headers_explain_the_growth_are_cut() -> None:
    memory = HeaderMemory()
    assert memory.check(HELD, Traffic({"bomb": 100, "honest": 100}, {}), 0.0) == set()
    received = {"bomb": 2 * MIB, "honest": 8 * MIB, "quiet": 1000}
    assert memory.check(HELD + GROWTH_BYTES, Traffic(received, {"honest": 8 * MIB}), 0.5) == {"bomb"}
    # While the memory is still held, further attackers are cut without further growth.
    late = Traffic({"other": MIB, **received}, {"honest": 8 * MIB})
    assert memory.check(HELD + GROWTH_BYTES, late, 0.6) == {"other"}


def test_growth_that_messages_explain_cuts_nobody() -> None:
    memory = HeaderMemory()
    memory.check(HELD, Traffic({}, {}), 0.0)
    half_sent = {"upload": 60 * MIB}
    assert memory.check(HELD + 2 * 60 * MIB, Traffic(half_sent, {}), 0.5) == set(), (
        "its message has not arrived completely"
    )
    assert memory.growth_bytes(HELD + MIB) == MIB
    model = HELD + 4096 * MIB
    assert memory.check(model, Traffic({"calls": 80 * MIB, "idle": 20_000}, {"calls": 80 * MIB}), 0.6) == set()


def test_growth_beyond_a_bound_cuts_peers_that_sent_many_bytes_outside_messages() -> None:
    memory = HeaderMemory()
    memory.check(HELD, Traffic({}, {}), 0.0)
    received = {"mixed": LARGE_GROWTH_BYTES, "honest": 90 * MIB}
    assert memory.check(HELD + LARGE_GROWTH_BYTES, Traffic(received, {"honest": 90 * MIB}), 0.5) == {"mixed"}


def test_large_messages_and_their_answers_cut_no_client_that_is_sending_one() -> None:
    memory = HeaderMemory()
    memory.check(HELD, Traffic({}, {}), 0.0)
    clients = [f"client-{number}" for number in range(8)]
    half_sent = dict.fromkeys(clients, 30 * MIB)
    assert memory.check(HELD + 8 * 30 * MIB, Traffic(half_sent, {}, set(clients)), 0.2) == set()
    # Two messages are complete: they are decoded, and their answers encoded.
    whole = {"client-0": 60 * MIB, "client-1": 60 * MIB}
    traffic = Traffic({**half_sent, **whole}, whole, set(clients[2:]), 120 * MIB)
    assert memory.check(HELD + 650 * MIB, traffic, 0.4) == set()
    # The window ends; what was decoded in it makes the process grow in the next one.
    assert memory.check(HELD + 400 * MIB, traffic, WINDOW_S + 0.1) == set()
    more = Traffic({**traffic.received, "client-2": 45 * MIB}, whole, set(clients[2:]), 120 * MIB)
    assert memory.check(HELD + 700 * MIB, more, WINDOW_S + 0.2) == set()
    # Headers among them are found by what they need.
    mixed = Traffic({**more.received, "bomb": 4 * MIB}, whole, {*clients[2:], "bomb"}, 120 * MIB)
    assert "bomb" in memory.check(HELD + 1200 * MIB, mixed, WINDOW_S + 0.3)


def test_slow_growth_and_old_bytes_do_not_count() -> None:
    memory = HeaderMemory()
    memory.check(HELD, Traffic({"old": 0}, {}), 0.0)
    assert memory.check(HELD + GROWTH_BYTES // 2, Traffic({"old": 90 * MIB}, {}), WINDOW_S) == set()
    assert memory.check(HELD + GROWTH_BYTES, Traffic({"old": 90 * MIB}, {}), WINDOW_S + 1) == set()
    assert memory.check(HELD + 2 * GROWTH_BYTES, Traffic({"old": 90 * MIB}, {}), WINDOW_S + 2) == set(), (
        "nobody sent anything"
    )


def test_messages_are_counted_with_an_allowance_for_their_call() -> None:
    arrived = ArrivedMessages()
    arrived.add("ipv4:10.0.0.1:1", 100, is_call=True)
    arrived.add("ipv4:10.0.0.1:1", 100, is_call=False)
    arrived.add("ipv4:10.0.0.2:1", LARGE_BYTES, is_call=True)
    with arrived.awaiting("ipv4:10.0.0.2:1"), arrived.awaiting("ipv4:10.0.0.2:1"):
        assert arrived.awaited.keys() == {"ipv4:10.0.0.2:1"}
    assert (arrived.large_bytes, arrived.awaited) == (LARGE_BYTES, {})
    del arrived.bytes["ipv4:10.0.0.2:1"]
    assert arrived.bytes == {"ipv4:10.0.0.1:1": 100 + CALL_BYTES + 100 + FRAME_BYTES}
