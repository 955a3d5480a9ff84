"""Room for large messages: which ones wait, which ones are refused, and when room is free again."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.core.config import Limits
from penstock.core.errors import Overloaded
from penstock.endpoints.held_bytes import COPIES, MOST_WAITING, Claim, Room, Transit

WAIT_S = 10.0


class Reader:
    def disconnect_client(self) -> None:
        raise AssertionError("not expected")


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def test_messages_wait_in_order_until_there_is_room() -> None:
    room = Room(100)
    await room.take(80)
    large, small = await started(room.take(50)), await started(room.take(10))
    assert not small.done(), "a small message does not overtake one that waits, which might never get room otherwise"
    room.give(80)
    await asyncio.wait_for(asyncio.gather(large, small), WAIT_S)
    assert room.bytes == 60


async def test_a_message_larger_than_the_room_is_alone() -> None:
    room = Room(100)
    await room.take(300)
    waiting = await started(room.take(1))
    assert not waiting.done()
    room.give(300)
    await asyncio.wait_for(waiting, WAIT_S)


async def test_a_message_that_waits_too_long_is_refused_and_takes_nothing() -> None:
    room = Room(100)
    await room.take(100)
    with pytest.raises(Overloaded) as refused:
        await room.take(10, wait_s=0.01)
    assert refused.value.is_retryable
    assert refused.value.retry_after_s > 0
    room.give(100)
    assert room.bytes == 0
    await room.take(100)


async def test_no_message_waits_longer_for_room_than_it_may_take_to_arrive() -> None:
    room = Transit(Limits(message_timeout_s=0.01)).room
    await room.take(room.max_bytes)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(room.take(10), WAIT_S)


async def test_a_caller_that_leaves_takes_nothing() -> None:
    room = Room(100)
    await room.take(100)
    first, second = await started(room.take(100)), await started(room.take(10))
    room.give(100)
    first.cancel()  # after it got room, and before it noticed
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(second, WAIT_S)
    assert room.bytes == 10


async def test_a_caller_that_leaves_does_not_hold_up_those_behind_it() -> None:
    room = Room(100)
    await room.take(90)
    large, small = await started(room.take(90)), await started(room.take(10))
    large.cancel()
    await asyncio.wait_for(small, WAIT_S)
    assert room.bytes == 100


async def test_a_limited_number_of_messages_waits() -> None:
    room = Room(100)
    await room.take(100)
    waiting = [await started(room.take(1)) for _ in range(MOST_WAITING)]
    with pytest.raises(Overloaded):
        await room.take(1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_messages_that_are_in_memory_already_wait_up_to_half_of_the_limit() -> None:
    room = Room(100)
    await room.take(100)
    waiting = await started(room.take(80, read_bytes=40))
    with pytest.raises(Overloaded):
        await room.take(40, read_bytes=20)
    room.give(100)
    await asyncio.wait_for(waiting, WAIT_S)


async def test_a_message_that_arrives_slowly_is_refused_if_others_wait() -> None:
    room = Room(100, arrive_s=0.02)
    claim = Claim(room)
    await claim.take(40)
    arriving = await started(claim.arrive(asyncio.Event().wait()))
    waiting = await started(room.take(100))
    with pytest.raises(Overloaded):
        await asyncio.wait_for(arriving, WAIT_S)
    claim.release()
    await asyncio.wait_for(waiting, WAIT_S)


async def test_a_message_that_pauses_between_two_parts_is_refused_at_its_next_part() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    room = Room(100, arrive_s=0.02)
    claim = Claim(room)
    await claim.take(40)
    await claim.arrive(asyncio.sleep(0))
    waiting = await started(room.take(100))
    await asyncio.sleep(0.1)  # several checks, while no part is awaited
    assert not errors
    with pytest.raises(Overloaded):
        await asyncio.wait_for(claim.arrive(asyncio.Event().wait()), WAIT_S)
    claim.release()
    await asyncio.wait_for(waiting, WAIT_S)


async def test_a_message_may_arrive_slowly_if_no_others_wait() -> None:
    room = Room(100, arrive_s=0.01)
    claim = Claim(room)
    await claim.take(40)
    assert await claim.arrive(asyncio.sleep(0.05, "all")) == "all"


async def test_a_claim_is_corrected_when_the_size_is_known() -> None:
    room = Room(1000)
    claim = Claim(room)
    await claim.take(100)
    claim.note_arrival(30)
    assert room.bytes == COPIES * 30
    claim.note_arrival(200)
    assert room.bytes == COPIES * 200
    claim.release()
    claim.release()
    assert room.bytes == 0


async def test_answers_that_are_not_read_take_room() -> None:
    transit = Transit(Limits(max_inflight_bytes=4096, max_message_bytes=1024))
    reader = Reader()
    transit.unsent.hold(reader, 3000)
    waiting = await started(transit.room.take(2000))
    assert not waiting.done()
    transit.unsent.take(reader, 2000)
    await asyncio.wait_for(waiting, WAIT_S)
    transit.unsent.drop(reader)
    assert transit.room.bytes == 2000
