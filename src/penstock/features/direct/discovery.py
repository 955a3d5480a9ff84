"""Finds a worker for a direct client, opens the worker's endpoint if needed, and signs the client's token."""

import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from penstock.core.blocks import SERVABLE, GatewayMember
from penstock.core.cluster.addresses import parse_address
from penstock.core.cluster.rendezvous import SessionOwners
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import InvalidRequest, Unauthenticated, Unavailable, UnknownModel
from penstock.core.principals import Principal
from penstock.endpoints.session_tokens import SigningKey, sign_token
from penstock.features.direct.worker_choice import Candidate, can_reach, choose, compute_distance
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deployed_block import DeployedBlock
from penstock.manager.publishing.publisher import ROUTE
from penstock.manager.term import Term, WorkerFacts, WorkerLoad
from penstock.manager.worker_liveness import LivenessState
from penstock.pb.v1 import access_pb2 as pb

OPEN_S = 10.0  # for a worker to open its endpoint
USE_GATEWAY = "send the request through a gateway"
NO_LOAD = WorkerLoad()


class KeyValidity(Protocol):
    def find_expiry(self, key_id: str) -> float:
        """Return when the key expires, in seconds since 1970; -inf if the key was revoked or deleted."""


class TokenSigning(Protocol):
    def get_key(self) -> SigningKey:
        """Return the current key for signing session tokens."""


class Discovery:
    """Finds workers for direct clients. Used from the manager's event loop."""

    def __init__(
        self,
        control: ControlPlane,
        keys: KeyValidity,
        signing: TokenSigning,
        is_tls: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a discovery. `is_tls`: the gateways' endpoints use TLS."""
        self._control = control
        self._keys = keys
        self._signing = signing
        self._is_tls = is_tls
        self._clock = clock
        self._given: dict[
            str, tuple[WorkerLoad, int]
        ] = {}  # by worker: its last reported load, and clients sent since then

    async def find(self, request: pb.DiscoverRequest, principal: Principal) -> pb.DiscoverResponse:
        """Return a worker's address and a token for the client; raise Unavailable if no worker can be called.

        A block that the principal may not use is reported as unknown.
        """
        self._control.check_leads()
        self._check_key(principal)
        block = self._find_block(request, principal)
        at = self._clock()
        token = sign_token(self._signing.get_key(), principal, block.block_id, at)
        session = principal.prefix_session_id(request.session_id) if request.session_id else ""
        if request.is_ordered and not session:
            raise InvalidRequest("`is_ordered` requires a session_id")
        found = pb.DiscoverResponse(
            token=token.text, expires_at=token.expires_at, lives_s=token.expires_at - at, block_id=block.block_id
        )
        if request.is_ordered:
            owner = self._find_owner(session)
            found.address, found.gateway_id, found.is_tls = owner.address, owner.gateway_id, self._is_tls
        else:
            found.worker_id, facts = await self._find_open_worker(block, request, session)
            found.address, found.is_tls = facts.door, facts.is_door_tls
        return found

    def _check_key(self, principal: Principal) -> None:
        """Check the key again, because the gateway that admitted the client may not know of a revocation yet."""
        if self._clock() >= min(principal.expires_at, self._keys.find_expiry(principal.key_id)):
            raise Unauthenticated("this key has expired or was revoked")

    # --- finding the block

    def _find_block(self, request: pb.DiscoverRequest, principal: Principal) -> DeployedBlock:
        table, name = self._control.term.blocks, request.block_id or request.model
        block = table.get(name)
        if block is None and not request.block_id:
            block = self._find_block_by_name(request)
        if block is None or not principal.may_use(block.model, block.block_id):
            raise UnknownModel(f"unknown model or block '{name[:128]}'")
        if block.compute_state()[0] not in SERVABLE:
            raise Unavailable(
                f"block '{block.block_id}' is {block.compute_state()[0]}; {USE_GATEWAY}, which waits for it"
            )
        return block

    def _find_block_by_name(self, request: pb.DiscoverRequest) -> DeployedBlock | None:
        term = self._control.term
        route = term.publisher.view.get(ROUTE + request.model)
        if isinstance(route, NameRoute) and not request.version:
            if route.is_split:
                raise Unavailable(f"a rollout splits the requests for '{request.model}'; {USE_GATEWAY}")
            return term.blocks.get(route.shares[0].block_id)
        blocks = [
            block for block in term.blocks.list_model_blocks(request.model) if request.version in ("", block.version)
        ]
        blocks = [block for block in blocks if block.is_wanted]
        return max(blocks, key=lambda each: (each.compute_state()[0] in SERVABLE, int(each.version)), default=None)

    # --- finding the gateway

    def _find_owner(self, session: str) -> GatewayMember:
        desired = self._control.desired
        members = {member.gateway_id: member for member in desired.gateways.list_members()}
        owner = members.get(SessionOwners(desired.membership, members).find_owner(session))
        if owner is None or not owner.address:
            raise Unavailable("no gateway can own the session at the moment; try again")
        return owner

    # --- finding the worker

    async def _find_open_worker(
        self, block: DeployedBlock, request: pb.DiscoverRequest, session: str
    ) -> tuple[str, WorkerFacts]:
        """Return the best worker whose endpoint is open, or opens in time, and the facts that the worker reported."""
        avoid = set(request.avoid)
        while worker := choose(self._find_candidates(block, request), session, avoid):
            term = self._control.term
            if not _is_open(term.facts[worker].door):
                term.open_direct_endpoint(worker)
                await self._control.notify()
                await self._control.wait_for(lambda: self._is_endpoint_settled(term, worker), OPEN_S)  # noqa: B023
            facts = term.facts.get(worker)
            if facts is not None and _is_open(facts.door):
                self._count_client(worker)
                return worker, facts
            avoid.add(worker)
        self._control.check_leads()
        raise Unavailable(f"no worker of block '{block.block_id}' has an endpoint that you can reach; {USE_GATEWAY}")

    def _is_endpoint_settled(self, term: Term, worker: str) -> bool:
        """Return whether to stop waiting for the worker's endpoint, because it is open or will not open."""
        facts = term.facts.get(worker)
        return facts is None or not facts.door or _is_open(facts.door) or self._control.term is not term

    def _find_candidates(self, block: DeployedBlock, request: pb.DiscoverRequest) -> Iterator[Candidate]:
        term = self._control.term
        for worker, state in block.workers.items():
            facts, life = term.facts.get(worker), term.liveness.get(worker)
            if (
                facts is None
                or life is None
                or life.state is not LivenessState.ALIVE
                or term.is_draining_or_removed(worker)
            ):
                continue
            how_far = compute_distance(request.zone, request.host, facts.zone, _list_host_names(facts))
            if state.may_serve and facts.door and can_reach(facts.door, how_far):
                yield Candidate(worker, state.is_serving, how_far, self._estimate_load(worker, facts))

    def _estimate_load(self, worker: str, facts: WorkerFacts) -> float:
        load = self._control.term.loads.get(worker, NO_LOAD)
        reported, given = self._given.get(worker, (load, 0))
        return (load.jobs + (given if reported is load else 0)) / (max(1, load.instances) * (facts.weight or 1.0))

    def _count_client(self, worker: str) -> None:
        load = self._control.term.loads.get(worker, NO_LOAD)
        reported, given = self._given.get(worker, (load, 0))
        self._given[worker] = load, given + 1 if reported is load else 1


def _is_open(endpoint: str) -> bool:
    return bool(endpoint) and parse_address(endpoint).port != 0


def _list_host_names(facts: WorkerFacts) -> Collection[str]:
    return {facts.host, facts.node, parse_address(facts.door).host} if facts.door else {facts.host, facts.node}
