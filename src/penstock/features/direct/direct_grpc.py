"""The gateway's `Discover` method for direct clients: resolves the block, and asks the manager for a worker."""
# ruff: noqa: N802 - the names are those of the protocol

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from math import isinf
from typing import Protocol

from penstock.core.blocks import BlockDescription
from penstock.core.cluster.routes import NameRoute
from penstock.core.errors import Forbidden, Overloaded, Unavailable
from penstock.core.principals import INFERENCE_SCOPES, Principal
from penstock.endpoints.guard import needs_scope
from penstock.pb.v1 import access_pb2 as pb

MAX_ASKING = 256  # concurrent calls
Discover = Callable[[pb.DiscoverRequest], Awaitable[pb.DiscoverResponse]]


class SplitRoute(Protocol):
    """The split of the requests for a model's name between several blocks."""

    @property
    def route(self) -> NameRoute: ...


class BlockResolver(Protocol):
    def resolve(self, model: str, version: str, principal: Principal) -> BlockDescription: ...

    def find_split(self, model: str) -> SplitRoute | None: ...


class DirectGrpc:
    def __init__(self, resolver: BlockResolver, discover: Discover, host: str = "") -> None:
        """Create the handler. `discover` calls the manager; `host` is used for callers that send no host."""
        self._resolver = resolver
        self._discover = discover
        self._host = host
        self._asking = 0

    @needs_scope(*INFERENCE_SCOPES)
    async def Discover(self, message: pb.DiscoverRequest, principal: Principal) -> pb.DiscoverResponse:
        if message.HasField("caller"):
            raise Forbidden("only a gateway of the cluster may set `caller`; leave it out")
        if self._asking >= MAX_ASKING:
            raise Overloaded(f"{MAX_ASKING} calls of Discover are already running; try again")
        self._asking += 1
        try:
            block, request = self._make_manager_request(message, principal)
            found = await self._discover(request)
            found.is_idempotent = block.settings.is_idempotent
            return found
        finally:
            self._asking -= 1

    def _make_manager_request(
        self, message: pb.DiscoverRequest, principal: Principal
    ) -> tuple[BlockDescription, pb.DiscoverRequest]:
        name, version = (message.block_id, "") if message.block_id else (message.model, message.version)
        block = self._resolver.resolve(name, version, principal)
        if not version and (split := self._resolver.find_split(name)) is not None and split.route.is_split:
            raise Unavailable(f"a rollout splits the requests for '{name}'; send the request through a gateway")
        is_ordered = message.is_ordered or bool(message.session_id and block.settings.sessions.is_ordered)
        return block, pb.DiscoverRequest(
            block_id=block.block_id,
            session_id=message.session_id,
            is_ordered=is_ordered,
            zone=message.zone,
            host=message.host or self._host,
            avoid=message.avoid,
            caller=_to_caller(principal),
        )


def _to_caller(principal: Principal) -> pb.DirectCaller:
    return pb.DirectCaller(
        name=principal.name,
        key_id=principal.key_id,
        scopes=sorted(principal.scopes),
        models=principal.models,
        blocks=principal.blocks,
        limits=None if principal.limits is None else pb.LimitsOfKey(**asdict(principal.limits)),
        expires_at=0.0 if isinf(principal.expires_at) else principal.expires_at,
    )
