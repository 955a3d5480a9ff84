"""Which worker a direct session goes to. Decides; never acts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from penstock.core.cluster.addresses import is_loopback, parse_address
from penstock.core.cluster.places import owner_of


class Distance(IntEnum):
    SAME_HOST = 0
    SAME_ZONE = 1
    ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take the block's requests, and has a door of its own."""

    worker_id: str
    is_resident: bool  # the block is in its memory; else it is loaded for the first request
    distance: Distance
    load: float  # what it has in hand, by what it can do at once


def choose(candidates: Iterable[Candidate], session: str = "", avoid: Collection[str] = ()) -> str:
    """A session has the worker that the router's hash names; else what is loaded, near and idle comes first.

    Empty: there is none.
    """
    found = [each for each in candidates if each.worker_id not in avoid]
    if session:
        return owner_of(sorted(each.worker_id for each in found), session)
    best = min(found, key=lambda each: (not each.is_resident, each.distance, each.load, each.worker_id), default=None)
    return "" if best is None else best.worker_id


def distance(zone: str, host: str, of_zone: str, of_hosts: Collection[str]) -> Distance:
    """From a caller in that zone and on that host."""
    if host and host in of_hosts:
        return Distance.SAME_HOST
    return Distance.SAME_ZONE if zone and zone == of_zone else Distance.ELSEWHERE


def can_reach(door: str, how_far: Distance) -> bool:
    """A door that is for its own machine alone is no door to others."""
    return how_far is Distance.SAME_HOST or not is_loopback(parse_address(door).host)
