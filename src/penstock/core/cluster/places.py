"""Rendezvous hashing over a fixed number of places: who a key belongs to, by names alone. Decides; never acts.

A key falls on one of the places, and each place belongs to the name with the highest score there: every process and
every machine finds the same, also after a restart.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

PLACES = 4096
Scores = NDArray[np.uint64]


def place_of(key: str) -> int:
    return digest(key) % PLACES


def digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def scores(seeds: list[int], places: NDArray[np.int64]) -> Scores:
    """splitmix64 of each seed at each place; a seed is the digest of a name."""
    steps: Scores = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed: Scores = np.array(seeds, np.uint64)[:, None] + steps[None, :]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def owner_of(names: Iterable[str], key: str) -> str:
    """Which of them the key belongs to; empty: there is none."""
    return _owner_at(list(names), place_of(key))


def _owner_at(names: Sequence[str], place: int) -> str:
    if not names:
        return ""
    return names[int(scores([digest(name) for name in names], np.array([place]))[:, 0].argmax())]


class Owners:
    """Which gateway owns a session. One that goes leaves its sessions to others; one that comes takes its share."""

    def __init__(self, revision: int, gateways: Iterable[str]) -> None:
        self.revision = revision  # of the membership
        self.gateways = tuple(sorted(gateways))
        self._by_place: dict[int, str] = {}  # as far as somebody asked

    def of(self, session_id: str) -> str:
        """Empty: there is no gateway."""
        place = place_of(session_id)
        if place not in self._by_place:
            self._by_place[place] = _owner_at(self.gateways, place)
        return self._by_place[place]
