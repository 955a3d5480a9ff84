"""Finds a worker for a client that goes direct, has its door opened where it is not, and signs the token for it."""

import time
from collections.abc import Callable, Collection, Iterator

from penstock.access.tokens import sign
from penstock.core.blocks import SERVABLE, GatewayMember
from penstock.core.cluster.addresses import parse_address
from penstock.core.cluster.places import Owners
from penstock.core.errors import InvalidRequest, Unauthenticated, Unavailable, UnknownModel
from penstock.core.principals import Principal
from penstock.core.routes import NameRoute
from penstock.manager.access.keys import Keys
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.direct.choice import Candidate, can_reach, choose, distance
from penstock.manager.direct.signing import Signing
from penstock.manager.lives import LifeState
from penstock.manager.manager import Manager
from penstock.manager.reign import Facts, Load, Reign
from penstock.manager.telling.boards import ROUTE
from penstock.pb.v1 import access_pb2 as pb

OPEN_S = 10.0  # what a worker gets to open its door
ROUTED = "go through a gateway"
NO_LOAD = Load()


class Discovery:
    """Used from the manager's event loop."""

    def __init__(
        self,
        manager: Manager,
        keys: Keys,
        signing: Signing,
        is_tls: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`is_tls`: whether gateways speak it."""
        self._manager = manager
        self._keys = keys
        self._signing = signing
        self._is_tls = is_tls
        self._clock = clock
        self._given: dict[str, tuple[Load, int]] = {}  # by worker: clients that were sent there since it told its load

    async def find(self, wanted: pb.DiscoverRequest, principal: Principal) -> pb.DiscoverResponse:
        """Raises where there is no way, and what the principal may not ask is to it as if it were not there."""
        self._manager.check_leads()
        self._check(principal)
        block = self._block(wanted, principal)
        token = sign(self._signing.key(), principal, block.block_id, self._clock())
        session = principal.session_id(wanted.session_id) if wanted.session_id else ""
        if wanted.is_ordered and not session:
            raise InvalidRequest("a session with an order has a session_id")
        way = pb.DiscoverResponse(token=token.text, expires_at=token.expires_at, block_id=block.block_id)
        if wanted.is_ordered:
            owner = self._owner(session)
            way.address, way.gateway_id, way.is_tls = owner.address, owner.gateway_id, self._is_tls
        else:
            way.worker_id, facts = await self._open(block, wanted, session)
            way.address, way.is_tls = facts.door, facts.is_door_tls
        return way

    def _check(self, principal: Principal) -> None:
        """Whoever passed it on may not have heard yet of a key that was revoked."""
        if self._keys.is_revoked(principal.key_id) or self._clock() >= principal.expires_at:
            raise Unauthenticated("this key has expired, or was revoked")

    # --- which block

    def _block(self, wanted: pb.DiscoverRequest, principal: Principal) -> DeployedBlock:
        registry, name = self._manager.reign.registry, wanted.block_id or wanted.model
        block = registry.get(name)
        if block is None and not wanted.block_id:
            block = self._named(wanted)
        if block is None or not principal.may_ask(block.model, block.block_id):
            raise UnknownModel(f"unknown model or block '{name[:128]}'")
        if block.state()[0] not in SERVABLE:
            raise Unavailable(f"block '{block.block_id}' is {block.state()[0]}: {ROUTED}, which waits for it")
        return block

    def _named(self, wanted: pb.DiscoverRequest) -> DeployedBlock | None:
        reign = self._manager.reign
        route = reign.boards.view.get(ROUTE + wanted.model)
        if isinstance(route, NameRoute) and not wanted.version:
            if route.is_split:
                raise Unavailable(f"a rollout decides about each request for '{wanted.model}': {ROUTED}")
            return reign.registry.get(route.shares[0].block_id)
        blocks = [block for block in reign.registry.of_model(wanted.model) if wanted.version in ("", block.version)]
        blocks = [block for block in blocks if block.is_wanted]
        return max(blocks, key=lambda each: (each.state()[0] in SERVABLE, int(each.version)), default=None)

    # --- which gateway

    def _owner(self, session: str) -> GatewayMember:
        desired = self._manager.desired
        members = {member.gateway_id: member for member in desired.gateways.members()}
        owner = members.get(Owners(desired.membership, members).of(session))
        if owner is None or not owner.address:
            raise Unavailable("no gateway is there that could own the session; try again")
        return owner

    # --- which worker

    async def _open(self, block: DeployedBlock, wanted: pb.DiscoverRequest, session: str) -> tuple[str, Facts]:
        """The best one whose door is open, or opens in time."""
        avoid = set(wanted.avoid)
        while worker := choose(self._candidates(block, wanted), session, avoid):
            reign = self._manager.reign
            if not _is_open(reign.facts[worker].door):
                reign.open_door(worker)
                await self._manager.notify()
                await self._manager.becomes(lambda: self._has_opened(reign, worker), OPEN_S)  # noqa: B023
            facts = reign.facts.get(worker)
            if facts is not None and _is_open(facts.door):
                self._count(worker)
                return worker, facts
            avoid.add(worker)
        self._manager.check_leads()
        raise Unavailable(f"no worker of block '{block.block_id}' has a door that you could reach: {ROUTED}")

    def _has_opened(self, reign: Reign, worker: str) -> bool:
        """Or never will."""
        facts = reign.facts.get(worker)
        return facts is None or not facts.door or _is_open(facts.door) or self._manager.reign is not reign

    def _candidates(self, block: DeployedBlock, wanted: pb.DiscoverRequest) -> Iterator[Candidate]:
        reign = self._manager.reign
        for worker, said in block.workers.items():
            facts, life = reign.facts.get(worker), reign.lives.get(worker)
            if facts is None or life is None or life.state is not LifeState.ALIVE or reign.is_closed(worker):
                continue
            how_far = distance(wanted.zone, wanted.host, facts.zone, _hosts(facts))
            if said.may_serve and facts.door and can_reach(facts.door, how_far):
                yield Candidate(worker, said.is_serving, how_far, self._load(worker, facts))

    def _load(self, worker: str, facts: Facts) -> float:
        load = self._manager.reign.loads.get(worker, NO_LOAD)
        told, given = self._given.get(worker, (load, 0))
        return (load.jobs + (given if told is load else 0)) / (max(1, load.instances) * (facts.weight or 1.0))

    def _count(self, worker: str) -> None:
        load = self._manager.reign.loads.get(worker, NO_LOAD)
        told, given = self._given.get(worker, (load, 0))
        self._given[worker] = load, given + 1 if told is load else 1


def _is_open(door: str) -> bool:
    return bool(door) and parse_address(door).port != 0


def _hosts(facts: Facts) -> Collection[str]:
    return {facts.host, facts.node, parse_address(facts.door).host} if facts.door else {facts.host, facts.node}
