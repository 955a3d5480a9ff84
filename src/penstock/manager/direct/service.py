"""Discover over gRPC: clients ask for a worker of their own, or gateways do for them."""

from math import inf
from typing import TypeAlias

import grpc

from penstock.access.guard import needs_scope
from penstock.core.errors import Forbidden, InvalidRequest, PenstockError
from penstock.core.principals import ANYBODY, INFERRING, KeyLimits, Principal, Scope
from penstock.manager.access.door import UNIX, acting
from penstock.manager.direct.discovery import Discovery, Wanted
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import access_pb2_grpc
from penstock.wire.failures import encode_failure
from penstock.wire.sockets import host_identity

Context: TypeAlias = grpc.aio.ServicerContext
LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", UNIX)
MAX_AVOIDED = 256


class DirectService(access_pb2_grpc.DirectServicer):
    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    @needs_scope(Scope.INFERENCE, Scope.JOIN)
    async def Discover(self, request: pb.DiscoverRequest, context: Context) -> pb.DiscoverResponse:  # noqa: N802
        try:
            host = request.host
            if not host and not request.HasField("caller") and context.peer().startswith(LOOPBACK):
                host = host_identity()  # it is on this machine
            way = await self._discovery.find(_wanted(request, host), _principal(request))
        except PenstockError as error:
            return pb.DiscoverResponse(failure=encode_failure(error))
        return pb.DiscoverResponse(
            address=way.address,
            token=way.token.text,
            expires_at=way.token.expires_at,
            block_id=way.block_id,
            worker_id=way.worker_id,
            gateway_id=way.gateway_id,
            is_tls=way.is_tls,
        )


def _wanted(request: pb.DiscoverRequest, host: str) -> Wanted:
    if len(request.avoid) > MAX_AVOIDED:
        raise InvalidRequest(f"more than {MAX_AVOIDED} workers to avoid")
    return Wanted(
        request.model,
        request.version,
        request.block_id,
        request.session_id,
        request.is_ordered,
        request.zone,
        host,
        tuple(request.avoid),
    )


def _principal(request: pb.DiscoverRequest) -> Principal:
    """Who asks: whoever calls, or whom a gateway tells that it admitted."""
    asked = acting.get()
    calling = ANYBODY if asked is None else asked.principal
    if not request.HasField("caller"):
        if not calling.may(INFERRING):
            raise Forbidden(f"the key '{calling.name}' may not do this: it needs the scope '{Scope.INFERENCE}'")
        return calling
    if not calling.may(frozenset((Scope.JOIN,))):
        raise Forbidden("only a gateway of the cluster says for whom it asks")
    told = request.caller
    limits = KeyLimits(**{field.name: value for field, value in told.limits.ListFields()})
    return Principal(
        told.name,
        told.key_id,
        INFERRING,
        tuple(told.models),
        tuple(told.blocks),
        limits if told.HasField("limits") else None,
        told.expires_at or inf,
    )
