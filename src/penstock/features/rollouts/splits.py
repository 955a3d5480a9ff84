"""Chooses the block of a route that answers a request, by weight, key or session. Pure: no I/O.

Keys and sessions are hashed against each block, and the highest weighted score wins (rendezvous hashing). So every
gateway chooses the same block, and shifting weight from one block to another moves only that share of the keys.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import accumulate
from math import log

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.routes import BlockShare, NameRoute
from penstock.core.controls import SEQUENCE_ID, SESSION_ID
from penstock.core.requests import InferRequest

MAX_HOMES = 65_536  # sessions per route whose block is remembered; the hash decides for other sessions
SCALE = 2.0**-64


class Split:
    """Chooses among the available blocks of a route."""

    def __init__(self, route: NameRoute, blocks: Mapping[str, BlockDescription], draw: Callable[[], float]) -> None:
        """Create a split. `draw` returns random numbers in [0, 1)."""
        self.route = route
        self._draw = draw
        self._homes: dict[str, str] = {}  # by session, the block of its first request
        self._given = 0  # requests that the block on trial got
        self.update(route, blocks)

    def update(self, route: NameRoute, blocks: Mapping[str, BlockDescription]) -> None:
        """Replace the route and the available blocks; keep the sessions' blocks and the count of trial requests."""
        if route.began != self.route.began:
            self._given = 0
        self.route = route
        self._blocks = {share.block_id: blocks[share.block_id] for share in route.shares if share.block_id in blocks}
        shares = [share for share in route.shares if share.weight > 0 and share.block_id in blocks]
        self._weighted = shares
        others = [share for share in shares if share.block_id != route.trial]
        self._without_trial = others or [BlockShare(each, 1.0) for each in self._blocks if each != route.trial]
        most = max(shares, key=lambda share: share.weight, default=None)
        # The block that describes the name to clients.
        self.primary = None if most is None else self._blocks[most.block_id]

    def choose(self, request: InferRequest) -> BlockDescription:
        """Return the block for a request. Call this only if `primary` is not None."""
        parameters = request.parameters
        session = key = ""
        if parameters:
            found = parameters.get(SESSION_ID) or parameters.get(SEQUENCE_ID) or ""
            session = request.principal.prefix_session_id(str(found)) if found else ""
            home = self._homes.get(session) if session else None
            if home is not None and home in self._blocks:
                return self._blocks[home]
            given = parameters.get(self.route.key) if self.route.sticky == "key" else None
            key = session if given is None else str(given)
        block_id = self._choose_block(key)
        if session:
            if len(self._homes) >= MAX_HOMES:
                del self._homes[next(iter(self._homes))]
            self._homes[session] = block_id
        return self._blocks[block_id]

    def wants_shadow(self) -> bool:
        """Decide randomly whether to send a copy of the current request to the shadow block."""
        return bool(self.route.shadow) and self._draw() < self.route.shadow_share

    def _choose_block(self, key: str) -> str:
        shares = self._weighted
        route = self.route
        is_spent = bool(route.trial) and self._given >= route.allowance
        if is_spent and self._without_trial:
            shares = self._without_trial
        block_id = choose_by_key(shares, route.name, key) if key else choose_by_draw(shares, self._draw())
        if block_id == route.trial:
            self._given += 1
        return block_id


def choose_by_draw(shares: list[BlockShare], draw: float) -> str:
    """Choose a block by weight. `draw` is a random number in [0, 1)."""
    bounds = list(accumulate(share.weight for share in shares))
    wanted = draw * bounds[-1]
    return next((share.block_id for share, bound in zip(shares, bounds, strict=True) if wanted < bound), shares[-1][0])


def choose_by_key(shares: list[BlockShare], name: str, key: str) -> str:
    if len(shares) == 1:
        return shares[0].block_id
    return max(shares, key=lambda share: _score_share(share, name, key)).block_id


def _score_share(share: BlockShare, name: str, key: str) -> float:
    text = f"{name}\0{share.block_id}\0{key}".encode("utf-8", "surrogatepass")
    drawn = int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
    return -share.weight / log((drawn + 0.5) * SCALE)
