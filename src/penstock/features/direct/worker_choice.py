"""Chooses the worker for a direct client. Pure: no I/O."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from penstock.core.cluster.addresses import is_loopback, parse_address
from penstock.core.cluster.rendezvous import find_owner


class Distance(IntEnum):
    SAME_HOST = 0
    SAME_ZONE = 1
    ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can serve the block and has a direct endpoint."""

    worker_id: str
    is_resident: bool  # the block is in memory; else the first request loads it
    distance: Distance
    load: float  # jobs divided by capacity


def choose(candidates: Iterable[Candidate], session: str = "", avoid: Collection[str] = ()) -> str:
    """Return the id of the chosen worker, or an empty string if there is none.

    A session goes to the worker that the router's hash selects. Other clients get a worker with the block in memory, if
    there is one; of several such workers the nearest, and of equally near workers the least loaded.
    """
    found = [each for each in candidates if each.worker_id not in avoid]
    if session:
        return find_owner(sorted(each.worker_id for each in found), session)
    best = min(found, key=lambda each: (not each.is_resident, each.distance, each.load, each.worker_id), default=None)
    return "" if best is None else best.worker_id


def compute_distance(zone: str, host: str, of_zone: str, of_hosts: Collection[str]) -> Distance:
    """Return the distance between a caller in `zone` on `host` and a worker in `of_zone` with names `of_hosts`."""
    if host and host in of_hosts:
        return Distance.SAME_HOST
    return Distance.SAME_ZONE if zone and zone == of_zone else Distance.ELSEWHERE


def can_reach(endpoint: str, distance: Distance) -> bool:
    """Return whether the caller can connect: a loopback endpoint can be reached only from its own machine."""
    return distance is Distance.SAME_HOST or not is_loopback(parse_address(endpoint).host)
