"""Which worker takes a job: the policies, and their names."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Protocol

from penstock.core.settings import Routing
from penstock.router.slots import MEMORY_S, Slot

Draw = Callable[[], float]  # from 0 to below 1
FARTHEST = 2
UNKNOWN_S = 1e6  # what a slot costs that runs its first jobs: it gets no more before one has shown how long they take


class SlotPolicy(Protocol):
    """Chooses among the slots that were added: those that have a credit left and are fit.

    Each call costs the same for ten slots and for a thousand, or grows as their logarithm.
    """

    is_counting: bool  # whether it wants to hear of changed()

    def add(self, slot: Slot) -> None: ...

    def remove(self, slot: Slot) -> None: ...

    def changed(self, slot: Slot) -> None:
        """The slot has more or fewer jobs than before."""

    def choose(self, now: float) -> Slot | None:
        """The slot that takes the next job, which the caller then gives it."""


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


class RoundRobin(Uncounted):
    """Whoever had a turn, or comes anew, goes to the end: while a slot waits for its turn, no other gets two."""

    def __init__(self) -> None:
        self._turns: OrderedDict[Slot, None] = OrderedDict()

    def add(self, slot: Slot) -> None:
        self._turns[slot] = None

    def remove(self, slot: Slot) -> None:
        del self._turns[slot]

    def choose(self, now: float) -> Slot | None:
        if not self._turns:
            return None
        slot = next(iter(self._turns))
        self._turns.move_to_end(slot)
        return slot


class LeastConnections:
    """Any of those with the fewest jobs. They lie in bags by how many they have; bits say which bags are not empty."""

    is_counting: bool = True

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._bags: dict[int, Bag] = {}
        self._open = 0  # bit n: some slot has n jobs

    def add(self, slot: Slot) -> None:
        count = slot.bucket = slot.in_flight
        bag = self._bags.get(count)
        if bag is None:
            bag = self._bags[count] = Bag()
        bag.add(slot)
        self._open |= 1 << count

    def remove(self, slot: Slot) -> None:
        bag = self._bags[slot.bucket]
        bag.remove(slot)
        if not bag.slots:
            self._open ^= 1 << slot.bucket

    def changed(self, slot: Slot) -> None:
        if slot.bucket != slot.in_flight:
            self.remove(slot)
            self.add(slot)

    def choose(self, now: float) -> Slot | None:
        if not self._open:
            return None
        slots = self._bags[(self._open & -self._open).bit_length() - 1].slots
        return slots[int(self._draw() * len(slots))]


class Weighted(Uncounted):
    """Stride scheduling: a slot's next turn comes 1/weight later, so turns are shared out as the weights are.

    A slot that comes, or comes back, starts at the present turn: it does not catch up on what it missed.
    """

    def __init__(self) -> None:
        self._turns: list[tuple[float, int, Slot]] = []  # with entries of slots that are not here any more
        self._present = 0.0
        self._entry = 0  # the newest entry's number; a slot keeps that of its own as its position
        self._slots = 0

    def add(self, slot: Slot) -> None:
        if slot.turn < self._present:
            slot.turn = self._present
        self._entry = slot.position = self._entry + 1
        self._slots += 1
        heappush(self._turns, (slot.turn, slot.position, slot))

    def remove(self, slot: Slot) -> None:
        slot.position = -1
        self._slots -= 1
        if len(self._turns) > 2 * self._slots + 64:
            self._turns = [entry for entry in self._turns if entry[2].position == entry[1]]
            heapify(self._turns)

    def choose(self, now: float) -> Slot | None:
        turns = self._turns
        while turns:
            turn, entry, slot = turns[0]
            if slot.position != entry:
                heappop(turns)
                continue
            self._present = turn
            slot.turn = turn + 1.0 / slot.weight
            self._entry = slot.position = self._entry + 1
            heapreplace(turns, (slot.turn, slot.position, slot))
            return slot
        return None


POLICIES: Mapping[str, Callable[[Draw], SlotPolicy]] = {
    "power_of_two": PowerOfTwo,
    "random": AnyOfAll,
    "least_latency": LeastLatency,
    "locality": Locality,
    "round_robin": lambda draw: RoundRobin(),
    "least_connections": LeastConnections,
    "weighted": lambda draw: Weighted(),
    "hash": PowerOfTwo,  # of the jobs without a key; the others are placed by it
}


def make_policy(routing: Routing, draw: Draw) -> SlotPolicy:
    return POLICIES[routing.policy](draw)


def _cost(slot: Slot, now: float) -> float:
    if not slot.latency_s:
        return UNKNOWN_S * slot.in_flight
    return slot.latency_s * exp((slot.measured - now) / MEMORY_S) * (slot.in_flight + 1)
