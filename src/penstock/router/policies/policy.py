"""Which worker takes a job: the policies by their names."""

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.core.settings import Routing
from penstock.router.policies.drawn import AnyOfAll, Draw, LeastLatency, Locality, PowerOfTwo
from penstock.router.policies.ordered import LeastConnections, RoundRobin, Weighted
from penstock.router.slots import Slot


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
