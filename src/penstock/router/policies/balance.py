"""Policies that draw slots at random: random, power of two, least latency, locality."""

from math import exp
from random import Random

from penstock.router.slots import MEMORY_S, Slot

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


class _Drawn(Bag):
    is_counting: bool = False

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._random = rng.random

    def changed(self, slot: Slot) -> None:
        """Drawing needs no order among the slots."""


class AnyOfAll(_Drawn):
    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        return slots[int(self._random() * len(slots))] if slots else None


class PowerOfTwo(_Drawn):
    """The emptier of two, in shares of what they may have."""

    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        count = len(slots)
        if count <= 1:
            return slots[0] if slots else None
        random = self._random
        first, second = slots[int(random() * count)], slots[int(random() * count)]
        return first if first.in_flight * second.credits <= second.in_flight * first.credits else second


class LeastLatency(_Drawn):
    """Of two, the one that would take the job through sooner: its latency times the jobs it would then have."""

    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        count = len(slots)
        if count <= 1:
            return slots[0] if slots else None
        random = self._random
        first, second = slots[int(random() * count)], slots[int(random() * count)]
        return first if _cost(first, now) <= _cost(second, now) else second


class Locality:
    """Power of two among the nearest slots that have a credit left."""

    is_counting: bool = False

    def __init__(self, rng: Random) -> None:
        self._tiers = [PowerOfTwo(rng) for _ in range(FARTHEST + 1)]

    def add(self, slot: Slot) -> None:
        slot.bucket = min(slot.distance, FARTHEST)
        self._tiers[slot.bucket].add(slot)

    def remove(self, slot: Slot) -> None:
        self._tiers[slot.bucket].remove(slot)

    def changed(self, slot: Slot) -> None:
        """Drawing needs no order among the slots."""

    def choose(self, now: float) -> Slot | None:
        for tier in self._tiers:
            if tier.slots:
                return tier.choose(now)
        return None


def _cost(slot: Slot, now: float) -> float:
    if not slot.latency_s:
        return UNKNOWN_S * slot.in_flight
    return slot.latency_s * exp((slot.measured - now) / MEMORY_S) * (slot.in_flight + 1)
