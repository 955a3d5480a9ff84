"""Which worker takes a job: the emptier of two chosen at random."""

from random import Random
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    credits: int

    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Candidates(Generic[C]):
    """The workers of a block that have a credit left; add, remove and choose cost the same for any number."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._items: list[C] = []
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: C) -> None:
        if id(item) not in self._index:
            self._index[id(item)] = len(self._items)
            self._items.append(item)

    def remove(self, item: C) -> None:
        position = self._index.pop(id(item), None)
        if position is None:
            return
        last = self._items.pop()
        if last is not item:
            self._items[position] = last
            self._index[id(last)] = position

    def choose(self) -> C | None:
        items = self._items
        if len(items) <= 1:
            return items[0] if items else None
        first, second = (
            items[int(self._rng.random() * len(items))],
            items[int(self._rng.random() * len(items))],
        )
        return first if first.in_flight * second.credits <= second.in_flight * first.credits else second
