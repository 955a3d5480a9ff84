"""Discover at a gateway: it says which block is meant and who asks, and the manager finds the worker."""
# ruff: noqa: N802 - the names are those of the protocol

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from math import isinf

from penstock.access.guard import needs_scope
from penstock.core.blocks import BlockDescription
from penstock.core.errors import Forbidden, Overloaded, Unavailable
from penstock.core.principals import INFERRING, Principal
from penstock.pb.v1 import access_pb2 as pb
from penstock.serving.resolve import Resolver

MAX_ASKING = 256  # at once
Discover = Callable[[pb.DiscoverRequest], Awaitable[pb.DiscoverResponse]]


class DirectGrpc:
    def __init__(self, resolver: Resolver, discover: Discover, host: str = "") -> None:
        """`discover` asks the manager; `host` is where callers are that do not say it, if that is known."""
        self._resolver = resolver
        self._discover = discover
        self._host = host
        self._asking = 0

    @needs_scope(*INFERRING)
    async def Discover(self, message: pb.DiscoverRequest, principal: Principal) -> pb.DiscoverResponse:
        if message.HasField("caller"):
            raise Forbidden("only a gateway of the cluster says for whom it asks")
        if self._asking >= MAX_ASKING:
            raise Overloaded("too many clients ask for a worker at once; try again")
        self._asking += 1
        try:
            block, asked = self._passed_on(message, principal)
            found = await self._discover(asked)
            found.is_idempotent = block.settings.is_idempotent
            return found
        finally:
            self._asking -= 1

    def _passed_on(
        self, message: pb.DiscoverRequest, principal: Principal
    ) -> tuple[BlockDescription, pb.DiscoverRequest]:
        name, version = (message.block_id, "") if message.block_id else (message.model, message.version)
        block = self._resolver.resolve(name, version, principal)
        if not version and (split := self._resolver.split(name)) is not None and split.route.is_split:
            raise Unavailable(f"a rollout decides about each request for '{name}': go through a gateway")
        is_ordered = message.is_ordered or bool(message.session_id and block.settings.sessions.is_ordered)
        return block, pb.DiscoverRequest(
            block_id=block.block_id,
            session_id=message.session_id,
            is_ordered=is_ordered,
            zone=message.zone,
            host=message.host or self._host,
            avoid=message.avoid,
            caller=_caller(principal),
        )


def _caller(principal: Principal) -> pb.DirectCaller:
    return pb.DirectCaller(
        name=principal.name,
        key_id=principal.key_id,
        scopes=sorted(principal.scopes),
        models=principal.models,
        blocks=principal.blocks,
        limits=None if principal.limits is None else pb.LimitsOfKey(**asdict(principal.limits)),
        expires_at=0.0 if isinf(principal.expires_at) else principal.expires_at,
    )
