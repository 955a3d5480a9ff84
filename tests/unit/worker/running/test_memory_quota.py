"""Memory for prepared requests: each block's share, the order of waiting requests, and releases."""

import random

from penstock.worker.running.memory_quota import MemoryQuota


def test_a_block_has_at_most_its_share_and_others_get_the_rest() -> None:
    room = MemoryQuota[str](100)
    assert room.share_bytes == 50
    assert room.enter("a", 30, "a1")
    assert not room.enter("a", 30, "a2")
    assert room.enter("b", 50, "b1")
    assert not room.enter("a", 10, "a3")  # it would fit, but comes after a2
    assert room.leave("b", 50) == []
    assert room.leave("a", 30) == ["a2", "a3"]


def test_blocks_take_turns() -> None:
    room = MemoryQuota[str](100)
    assert room.enter("x", 50, "x1")
    assert room.enter("y", 50, "y1")
    for item in ("a1", "a2", "a3", "b1", "c1"):
        assert not room.enter(item[0], 20, item)
    assert room.leave("x", 50) == ["a1", "b1"]
    assert room.leave("y", 50) == ["c1", "a2"]
    assert room.leave("a", 20) == ["a3"]


def test_a_withdrawn_request_does_not_delay_others() -> None:
    room = MemoryQuota[str](100)
    assert room.enter("a", 50, "a1")
    assert not room.enter("a", 50, "a2")
    assert not room.enter("a", 20, "a3")
    room.withdraw("a", "a2")
    room.withdraw("b", "nobody")
    assert room.leave("a", 50) == ["a3"]
    room.withdraw("a", "a3")  # it does not wait any more
    assert room.leave("a", 20) == []


def test_the_limit_holds_and_every_request_is_eventually_admitted() -> None:
    rng = random.Random(3)
    room = MemoryQuota[tuple[str, int, int]](1000)
    held: list[tuple[str, int, int]] = []
    waiting: set[tuple[str, int, int]] = set()
    for number in range(5000):
        if held and rng.random() < 0.5:
            block, size, _ = held.pop(rng.randrange(len(held)))
            entering = room.leave(block, size)
            waiting -= set(entering)
            held += entering
        else:
            item = (rng.choice("abcd"), rng.randrange(1, 500), number)
            if room.enter(item[0], item[1], item):
                held.append(item)
            else:
                waiting.add(item)
        assert sum(size for _, size, _ in held) <= 1000
        assert all(sum(size for block, size, _ in held if block == each) <= 500 for each in "abcd")
    while held:
        block, size, _ = held.pop()
        entering = room.leave(block, size)
        waiting -= set(entering)
        held += entering
    assert not waiting
