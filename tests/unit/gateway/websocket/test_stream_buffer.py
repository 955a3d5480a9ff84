"""The window of a stream, and the order of its answers."""

from penstock.gateway.websocket.stream_buffer import FIRST_ANSWER_BYTES, StreamBuffer, StreamSlot

MIB = 1024 * 1024


def buffer(is_ordered: bool = True, max_requests: int = 100, max_bytes: int = 1000 * MIB) -> StreamBuffer[str]:
    return StreamBuffer(is_ordered, max_requests, max_bytes)


def send_all(made: StreamBuffer[str]) -> list[str]:
    """Return the answers that are sent now."""
    sent = []
    while (slot := made.peek_slot()) is not None:
        sent.append(slot.answer)
        made.mark_sent(slot)
    return sent


def begin(made: StreamBuffer[str], count: int) -> list[StreamSlot[str]]:
    return [made.begin(10, is_decoupled=False) for _ in range(count)]


def test_ordered_answers_wait_for_earlier_ones() -> None:
    made = buffer()
    first, second, third = begin(made, 3)
    made.put(third, "third", 1)
    made.put(second, "second", 1)
    assert send_all(made) == []
    made.put(first, "first", 1)
    assert send_all(made) == ["first", "second", "third"]
    assert (made.requests, made.bytes) == (0, 0)


def test_unordered_answers_are_sent_as_they_come() -> None:
    made = buffer(is_ordered=False)
    first, second = begin(made, 2)
    made.put(second, "second", 1)
    assert send_all(made) == ["second"]
    made.put(first, "first", 1)
    assert send_all(made) == ["first"]


def test_decoupled_answers_keep_their_order_and_delay_no_others() -> None:
    made = buffer()
    (slow,) = begin(made, 1)
    decoupled = made.begin(10, is_decoupled=True)
    (quick,) = begin(made, 1)
    made.put(decoupled, "d1", 1, is_last=False)
    made.put(quick, "quick", 1)
    assert send_all(made) == ["d1"]  # not behind the slow one, and not before what waits for it
    made.put(decoupled, "d2", 1, is_last=False)
    assert send_all(made) == ["d2"]
    made.put(slow, "slow", 1)
    assert send_all(made) == ["slow", "quick"]
    assert made.requests == 1
    made.put(decoupled, "d3", 1)
    assert send_all(made) == ["d3"]
    assert (made.requests, made.bytes) == (0, 0)


def test_a_decoupled_request_may_end_without_a_last_answer() -> None:
    made = buffer()
    decoupled = made.begin(10, is_decoupled=True)
    made.put(decoupled, "d1", 5, is_last=False)
    assert send_all(made) == ["d1"]
    made.end(decoupled)
    assert (made.requests, made.bytes) == (0, 0)


def test_the_window_counts_requests_until_their_answers_are_sent() -> None:
    made = buffer(max_requests=2)
    first, second = begin(made, 2)
    assert not made.has_room()
    made.put(first, "first", 1)
    assert not made.has_room()
    assert send_all(made) == ["first"]
    assert made.has_room()
    made.put(second, "second", 1)
    send_all(made)
    assert made.has_room()


def test_the_window_counts_bytes_of_requests_and_of_unsent_answers() -> None:
    made = buffer(max_bytes=10 * MIB)
    slot = made.begin(8 * MIB, is_decoupled=False)
    assert made.has_room()
    other = made.begin(1, is_decoupled=False)
    assert not made.has_room()
    made.put(slot, "answer", 1)  # the request is gone, and its answer is small
    assert made.has_room()
    made.put(other, "large", 12 * MIB)
    assert not made.has_room()
    assert send_all(made) == ["answer", "large"]
    assert made.has_room()
    assert made.bytes == 0


def test_an_empty_stream_may_read_any_message() -> None:
    made = buffer(max_bytes=1)
    assert made.has_room()
    slot = made.begin(100 * MIB, is_decoupled=False)
    assert not made.has_room()
    made.put(slot, "answer", 100 * MIB)
    send_all(made)
    assert made.has_room()


def test_memory_is_reserved_for_expected_answers() -> None:
    made = buffer(max_bytes=64 * MIB)
    slot = made.begin(1, is_decoupled=False)
    made.put(slot, "answer", 16 * MIB)
    send_all(made)
    begun = 0
    while made.has_room():
        made.begin(1, is_decoupled=False)
        begun += 1
    assert begun == 4  # 16 MiB is kept for the answer of each


def test_the_reserved_memory_follows_the_size_of_answers() -> None:
    made = buffer(max_requests=1000, max_bytes=32 * MIB)
    for _ in range(100):
        slot = made.begin(100, is_decoupled=False)
        made.put(slot, "answer", 100)
        send_all(made)
    begin(made, 999)
    assert made.has_room()
    assert made.bytes < 999 * 1000


def test_the_first_answers_are_expected_to_be_large() -> None:
    made = buffer(max_bytes=8 * FIRST_ANSWER_BYTES)
    begin(made, 7)
    assert made.has_room()
    begin(made, 1)
    assert not made.has_room()


def test_a_decoupled_request_counts_itself_and_one_answer() -> None:
    made = buffer()
    slot = made.begin(100, is_decoupled=True)
    for _ in range(50):
        made.put(slot, "answer", 1000, is_last=False)
        assert made.bytes == 1100
        send_all(made)
        assert made.bytes == 1100
