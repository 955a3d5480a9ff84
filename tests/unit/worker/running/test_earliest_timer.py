"""The timer for the next of many times, on a real event loop."""

import asyncio
from math import inf

from penstock.worker.running.earliest_timer import EarliestTimer, now


async def test_the_timer_fires_once_at_its_earliest_time() -> None:
    rung = asyncio.Event()
    rings: list[float] = []

    def ring() -> None:
        rings.append(now())
        rung.set()

    alarm = EarliestTimer(ring)
    alarm.set(inf)
    assert alarm.due_at == inf
    soon = now() + 0.02
    for at in (now() + 60.0, soon, now() + 30.0):
        alarm.set(at)
    assert alarm.due_at == soon
    await asyncio.wait_for(rung.wait(), 10)
    assert alarm.due_at == inf
    assert len(rings) == 1
    assert soon - 0.001 <= rings[0]


async def test_a_timer_can_be_cancelled_and_set_again_in_its_callback() -> None:
    rings: list[str] = []
    alarm = EarliestTimer(lambda: rings.append("cancelled"))
    alarm.set(now() - 1.0)
    alarm.cancel()
    done = asyncio.Event()

    def again() -> None:
        rings.append("rung")
        if len(rings) < 3:
            other.set(now())
        else:
            done.set()

    other = EarliestTimer(again, least_s=0.001)
    other.set(now() - 1.0)
    await asyncio.wait_for(done.wait(), 10)
    assert rings == ["rung"] * 3
