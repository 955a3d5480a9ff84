"""Which slot a key belongs to: rendezvous hashing over a fixed number of places.

A key falls on one of the places, and each place belongs to the slot with the highest score there. So finding a key's
slot is one look, a slot that leaves moves its own places only, and one that comes takes what it wins and nothing else.
Scores depend on the worker's name and the place alone: every gateway finds the same, also after a restart.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from penstock.router.slots import Slot

PLACES = 4096
Scores = NDArray[np.uint64]


class KeyPlaces:
    """The fit slots of a block. Nothing is computed before the first key comes."""

    def __init__(self) -> None:
        self._seeds: dict[Slot, int] = {}
        self._owners: list[Slot] = []  # by place; empty: not computed, or nobody is there
        self._best: Scores = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._seeds)

    def __contains__(self, slot: Slot | None) -> bool:
        return slot in self._seeds

    def add(self, slot: Slot) -> None:
        self._seeds[slot] = _digest(slot.name)
        if self._owners:
            self._contest(slot)

    def remove(self, slot: Slot) -> None:
        if self._seeds.pop(slot, None) is None or not self._owners:
            return
        if not self._seeds:
            self._owners = []
            return
        lost = [place for place, owner in enumerate(self._owners) if owner is slot]
        if lost:
            self._hand_out(np.array(lost))

    def owner(self, key: str) -> Slot | None:
        if not self._owners:
            if not self._seeds:
                return None
            self._compute()
        return self._owners[place_of(key)]

    def _compute(self) -> None:
        first, *others = self._seeds
        self._owners = [first] * PLACES
        self._best = _scores([self._seeds[first]], np.arange(PLACES))[0]
        for slot in others:
            self._contest(slot)

    def _contest(self, slot: Slot) -> None:
        scores = _scores([self._seeds[slot]], np.arange(PLACES))[0]
        won = scores > self._best
        self._best[won] = scores[won]
        for place in np.flatnonzero(won).tolist():
            self._owners[place] = slot

    def _hand_out(self, places: NDArray[np.int64]) -> None:
        slots = list(self._seeds)
        scores = _scores(list(self._seeds.values()), places)
        self._best[places] = scores.max(axis=0)
        for place, best in zip(places.tolist(), scores.argmax(axis=0).tolist(), strict=True):
            self._owners[place] = slots[best]


def place_of(key: str) -> int:
    return _digest(key) % PLACES


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _scores(seeds: list[int], places: NDArray[np.int64]) -> Scores:
    """splitmix64 of each seed at each place: alike in every process and on every machine."""
    steps: Scores = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed: Scores = np.array(seeds, np.uint64)[:, None] + steps[None, :]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
