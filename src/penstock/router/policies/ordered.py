"""Policies that keep slots in an order: round robin, least connections, weighted."""

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

from penstock.router.policies.drawn import Bag, Draw, Uncounted
from penstock.router.slots import Slot


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
