"""Which slot a key belongs to: rendezvous hashing over a fixed number of places.

A key falls on one of the places, and each place belongs to the slot with the highest score there. So finding a key's
slot is one look, a slot that leaves moves its own places only, and one that comes takes what it wins and nothing else.
Scores depend on the worker's name and the place alone: every gateway finds the same, also after a restart.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.core.cluster.places import PLACES, Scores, digest, place_of, scores
from penstock.router.slots import Slot


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
        self._seeds[slot] = digest(slot.name)
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
        self._best = scores([self._seeds[first]], np.arange(PLACES))[0]
        for slot in others:
            self._contest(slot)

    def _contest(self, slot: Slot) -> None:
        found = scores([self._seeds[slot]], np.arange(PLACES))[0]
        won = found > self._best
        self._best[won] = found[won]
        for place in np.flatnonzero(won).tolist():
            self._owners[place] = slot

    def _hand_out(self, places: NDArray[np.int64]) -> None:
        slots = list(self._seeds)
        found = scores(list(self._seeds.values()), places)
        self._best[places] = found.max(axis=0)
        for place, best in zip(places.tolist(), found.argmax(axis=0).tolist(), strict=True):
            self._owners[place] = slots[best]
