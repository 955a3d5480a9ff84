"""Rendezvous hashing over a fixed number of partitions: computes the owner of a key from the candidates' names alone.

A key belongs to one partition, and a partition belongs to the name with the highest score for it. Every process on
every machine computes the same owner, also after a restart.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

PARTITIONS = 4096
Scores = NDArray[np.uint64]


def compute_partition(key: str) -> int:
    return compute_digest(key) % PARTITIONS


def compute_digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def compute_scores(seeds: list[int], partitions: NDArray[np.int64]) -> Scores:
    """Return the splitmix64 hash of each pair of seed and partition. A seed is the digest of a name."""
    steps: Scores = partitions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed: Scores = np.array(seeds, np.uint64)[:, None] + steps[None, :]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def find_owner(names: Iterable[str], key: str) -> str:
    """Return the name that owns the key; empty if `names` is empty."""
    return _find_partition_owner(list(names), compute_partition(key))


def _find_partition_owner(names: Sequence[str], partition: int) -> str:
    if not names:
        return ""
    return names[int(compute_scores([compute_digest(name) for name in names], np.array([partition]))[:, 0].argmax())]


class SessionOwners:
    """Finds the gateway that owns a session.

    The sessions of a gateway that leaves are divided among the other gateways; a new gateway gets a share of all
    sessions.
    """

    def __init__(self, revision: int, gateways: Iterable[str]) -> None:
        self.revision = revision  # of the membership
        self.gateways = tuple(sorted(gateways))
        self._by_partition: dict[int, str] = {}  # computed on demand

    def find_owner(self, session_id: str) -> str:
        """Return the gateway that owns a session; empty if there are no gateways."""
        partition = compute_partition(session_id)
        if partition not in self._by_partition:
            self._by_partition[partition] = _find_partition_owner(self.gateways, partition)
        return self._by_partition[partition]
