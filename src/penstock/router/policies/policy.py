"""The policies that choose a slot for a job, and the policies' names in settings."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Protocol

from penstock.core.settings import Routing
from penstock.router.slots import LATENCY_DECAY_S, Slot

RandomNumber = Callable[[], float]  # returns a random number from 0 to below 1
MAX_DISTANCE = 2
UNMEASURED_LATENCY_S = (
    1e6  # assumed latency before a slot's first answer, so that it gets a second job only after that answer
)


class SlotPolicy(Protocol):
    """Chooses a slot (a block on a worker) for a job. A slot is added while it can take a job and is not ejected.

    Each call takes constant time, or time that grows with the logarithm of the number of slots.
    """

    is_tracking_job_counts: bool  # whether callers must call `update_job_count`

    def add(self, slot: Slot) -> None: ...

    def remove(self, slot: Slot) -> None: ...

    def update_job_count(self, slot: Slot) -> None:
        """Handle a change of the slot's number of jobs."""

    def choose(self, now: float) -> Slot | None:
        """Return the slot to which the caller assigns the next job, or None if there are no slots."""


class SlotSet:
    """A set of slots. Adding, removing and choosing a random slot take constant time."""

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


class CountIndependentPolicy:
    """Base class of the policies that do not depend on a slot's number of jobs."""

    is_tracking_job_counts: bool = False

    def update_job_count(self, slot: Slot) -> None: ...


class _RandomPolicy(CountIndependentPolicy, SlotSet):
    def __init__(self, draw: RandomNumber) -> None:
        super().__init__()
        self._draw = draw


class RandomSlot(_RandomPolicy):
    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        return slots[int(self._draw() * len(slots))] if slots else None


class PowerOfTwo(_RandomPolicy):
    """Draws two random slots, and chooses the slot that uses the smaller part of its credits."""

    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        count = len(slots)
        if count <= 1:
            return slots[0] if slots else None
        draw = self._draw
        first, second = slots[int(draw() * count)], slots[int(draw() * count)]
        return first if first.in_flight * second.credits <= second.in_flight * first.credits else second


class LeastLatency(_RandomPolicy):
    """Draws two random slots, and chooses the slot with the lower product of latency and number of jobs."""

    def choose(self, now: float) -> Slot | None:
        slots = self.slots
        count = len(slots)
        if count <= 1:
            return slots[0] if slots else None
        draw = self._draw
        first, second = slots[int(draw() * count)], slots[int(draw() * count)]
        return first if _estimate_latency(first, now) <= _estimate_latency(second, now) else second


class Locality(CountIndependentPolicy):
    """Applies PowerOfTwo to the nearest slots that have a credit left."""

    def __init__(self, draw: RandomNumber) -> None:
        self._tiers = [PowerOfTwo(draw) for _ in range(MAX_DISTANCE + 1)]

    def add(self, slot: Slot) -> None:
        slot.bucket = min(slot.distance, MAX_DISTANCE)
        self._tiers[slot.bucket].add(slot)

    def remove(self, slot: Slot) -> None:
        self._tiers[slot.bucket].remove(slot)

    def choose(self, now: float) -> Slot | None:
        for tier in self._tiers:
            if tier.slots:
                return tier.choose(now)
        return None


class RoundRobin(CountIndependentPolicy):
    """Chooses the slots one after the other; a slot moves to the end of the order when it is added or chosen."""

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
    """Chooses at random among the slots with the fewest jobs.

    Slots are kept in sets by their number of jobs, and a bit mask marks the sets that are not empty.
    """

    is_tracking_job_counts: bool = True

    def __init__(self, draw: RandomNumber) -> None:
        self._draw = draw
        self._by_count: dict[int, SlotSet] = {}
        self._used_counts = 0  # bit n is set if some slot has n jobs

    def add(self, slot: Slot) -> None:
        count = slot.bucket = slot.in_flight
        same_count = self._by_count.get(count)
        if same_count is None:
            same_count = self._by_count[count] = SlotSet()
        same_count.add(slot)
        self._used_counts |= 1 << count

    def remove(self, slot: Slot) -> None:
        same_count = self._by_count[slot.bucket]
        same_count.remove(slot)
        if not same_count.slots:
            self._used_counts ^= 1 << slot.bucket

    def update_job_count(self, slot: Slot) -> None:
        if slot.bucket != slot.in_flight:
            self.remove(slot)
            self.add(slot)

    def choose(self, now: float) -> Slot | None:
        if not self._used_counts:
            return None
        slots = self._by_count[(self._used_counts & -self._used_counts).bit_length() - 1].slots
        return slots[int(self._draw() * len(slots))]


class WeightedTurns(CountIndependentPolicy):
    """Stride scheduling: a slot's next turn comes 1/weight later, so each slot gets turns in proportion to its weight.

    A slot that is added, or added again, starts at the current turn, so that it does not catch up on missed turns.
    """

    def __init__(self) -> None:
        self._turns: list[tuple[float, int, Slot]] = []  # a heap that may hold entries of removed slots
        self._current_turn = 0.0
        self._newest_entry = 0  # number of the newest entry; a slot's current entry number is its `position`
        self._slots = 0

    def add(self, slot: Slot) -> None:
        if slot.turn < self._current_turn:
            slot.turn = self._current_turn
        self._newest_entry = slot.position = self._newest_entry + 1
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
            self._current_turn = turn
            slot.turn = turn + 1.0 / slot.weight
            self._newest_entry = slot.position = self._newest_entry + 1
            heapreplace(turns, (slot.turn, slot.position, slot))
            return slot
        return None


POLICIES: Mapping[str, Callable[[RandomNumber], SlotPolicy]] = {
    "power_of_two": PowerOfTwo,
    "random": RandomSlot,
    "least_latency": LeastLatency,
    "locality": Locality,
    "round_robin": lambda draw: RoundRobin(),
    "least_connections": LeastConnections,
    "weighted": lambda draw: WeightedTurns(),
    "hash": PowerOfTwo,  # for jobs without a key; `KeyOwners` chooses the slot for a job with a key
}


def make_policy(routing: Routing, draw: RandomNumber) -> SlotPolicy:
    return POLICIES[routing.policy](draw)


def _estimate_latency(slot: Slot, now: float) -> float:
    if not slot.latency_s:
        return UNMEASURED_LATENCY_S * slot.in_flight
    return slot.latency_s * exp((slot.measured_at - now) / LATENCY_DECAY_S) * (slot.in_flight + 1)
