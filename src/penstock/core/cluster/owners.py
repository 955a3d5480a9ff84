"""Which gateway owns a session, by one list of gateways: each finds the same. Decides; never acts."""

from collections.abc import Iterable
from hashlib import blake2b

from penstock.core.cluster.places import place_of


class Owners:
    """Rendezvous hashing: a gateway that goes leaves its own sessions to others, and one that comes takes its share."""

    def __init__(self, revision: int, gateways: Iterable[str]) -> None:
        self.revision = revision  # of the membership
        self.gateways = tuple(sorted(gateways))
        self._by_place: dict[int, str] = {}  # as far as somebody asked

    def of(self, session_id: str) -> str:
        """Empty: there is no gateway."""
        place = place_of(session_id)
        owner = self._by_place.get(place)
        if owner is None:
            owner = max(self.gateways, key=lambda gateway: _score(gateway, place), default="")
            self._by_place[place] = owner
        return owner


def _score(gateway: str, place: int) -> bytes:
    return blake2b(f"{gateway}\0{place}".encode(), digest_size=8).digest()
