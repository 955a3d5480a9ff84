"""Policies that draw slots at random: random, power of two, least latency, locality."""

from collections.abc import Callable
from math import exp

from penstock.router.slots import MEMORY_S, Slot

Draw = Callable[[], float]  # from 0 to below 1
FARTHEST = 2
UNKNOWN_S = 1e6  # what a slot costs that runs its first jobs: it gets no more before one has shown how long they take


class Bag:
    """Slots to draw from; adding, removing and drawing cost the same for any number."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    def add(self, slot: Slot) -> None:
        slot.position = len(self.slots)
        self.slots.append(slot)

    def remove(self, slot: Slot) -> None:
        last = self.slots.pop()
        if last is not slot:
            self.slots[slot.position] = last
            last.position = slot.position
        slot.position = -1


class Uncounted:
    """A policy to which it does not matter how many jobs a slot has."""

    is_counting: bool = False

    def changed(self, slot: Slot) -> None: ...


class _Drawn(Uncounted, Bag):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw


class AnyOfAll(_Drawn):
    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        return slots[int(self._draw() * len(slots))] if slots else None


class PowerOfTwo(_Drawn):
    """The emptier of two, in shares of what they may have."""

    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        count = len(slots)
        if count <= 1:
            return slots[0] if slots else None
        draw = self._draw
        first, second = slots[int(draw() * count)], slots[int(draw() * count)]
        return first if first.in_flight * second.credits <= second.in_flight * first.credits else second


class LeastLatency(_Drawn):
    """Of two, the one that would take the job through sooner: its latency times the jobs it would then have."""

    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        count = len(slots)
        if count <= 1:
            return slots[0] if slots else None
        draw = self._draw
        first, second = slots[int(draw() * count)], slots[int(draw() * count)]
        return first if _cost(first, now) <= _cost(second, now) else second


class Locality(Uncounted):
    """Power of two among the nearest slots that have a credit left."""

    def __init__(self, draw: Draw) -> None:
        self._tiers = [PowerOfTwo(draw) for _ in range(FARTHEST + 1)]

    def add(self, slot: Slot) -> None:
        slot.bucket = min(slot.distance, FARTHEST)
        self._tiers[slot.bucket].add(slot)

    def remove(self, slot: Slot) -> None:
        self._tiers[slot.bucket].remove(slot)

    def choose(self, now: float) -> Slot | None:
        for tier in self._tiers:
            if tier.slots:
                return tier.choose(now)
        return None


def _cost(slot: Slot, now: float) -> float:
    if not slot.latency_s:
        return UNKNOWN_S * slot.in_flight
    return slot.latency_s * exp((slot.measured - now) / MEMORY_S) * (slot.in_flight + 1)
