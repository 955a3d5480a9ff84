"""The map from keys to slots: rendezvous hashing over a fixed number of partitions.

Each key hashes to one partition, and each partition belongs to the slot with the highest score for the partition. So
the slot of a key is found by one lookup, the removal of a slot changes only the owners of its own partitions, and a new
slot takes only the partitions for which its score is highest. Scores depend only on the worker's name and the
partition, so that every gateway computes the same map, also after a restart.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.core.cluster.rendezvous import PARTITIONS, Scores, compute_digest, compute_partition, compute_scores
from penstock.router.slots import Slot


class KeyOwners:
    """Maps keys to the slots of a block that are not ejected. The first lookup computes the owner of each partition."""

    def __init__(self) -> None:
        self._seeds: dict[Slot, int] = {}
        self._owners: list[Slot] = []  # by partition; empty if not computed yet or if there are no slots
        self._best: Scores = np.zeros(0, np.uint64)  # the owner's score, by partition

    def __len__(self) -> int:
        return len(self._seeds)

    def __contains__(self, slot: Slot | None) -> bool:
        return slot in self._seeds

    def add(self, slot: Slot) -> None:
        self._seeds[slot] = compute_digest(slot.name)
        if self._owners:
            self._take_partitions(slot)

    def remove(self, slot: Slot) -> None:
        if self._seeds.pop(slot, None) is None or not self._owners:
            return
        if not self._seeds:
            self._owners = []
            return
        lost = [partition for partition, owner in enumerate(self._owners) if owner is slot]
        if lost:
            self._reassign(np.array(lost))

    def find_owner(self, key: str) -> Slot | None:
        if not self._owners:
            if not self._seeds:
                return None
            self._compute_owners()
        return self._owners[compute_partition(key)]

    def _compute_owners(self) -> None:
        first, *others = self._seeds
        self._owners = [first] * PARTITIONS
        self._best = compute_scores([self._seeds[first]], np.arange(PARTITIONS))[0]
        for slot in others:
            self._take_partitions(slot)

    def _take_partitions(self, slot: Slot) -> None:
        found = compute_scores([self._seeds[slot]], np.arange(PARTITIONS))[0]
        won = found > self._best
        self._best[won] = found[won]
        for partition in np.flatnonzero(won).tolist():
            self._owners[partition] = slot

    def _reassign(self, partitions: NDArray[np.int64]) -> None:
        slots = list(self._seeds)
        found = compute_scores(list(self._seeds.values()), partitions)
        self._best[partitions] = found.max(axis=0)
        for partition, best in zip(partitions.tolist(), found.argmax(axis=0).tolist(), strict=True):
            self._owners[partition] = slots[best]
