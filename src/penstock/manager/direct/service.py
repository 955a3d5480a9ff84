"""Discover over gRPC: clients ask for a worker of their own, or gateways do for them."""

from math import inf

from penstock.access.guard import needs_scope
from penstock.core.errors import Forbidden, InvalidRequest
from penstock.core.principals import INFERRING, KeyLimits, Principal, Scope
from penstock.manager.access.door import UNIX, Context, caller
from penstock.manager.direct.discovery import Discovery
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import access_pb2_grpc
from penstock.wire.sockets import host_identity

LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", UNIX)
MAX_AVOIDED = 256


class DirectService(access_pb2_grpc.DirectServicer):
    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    @needs_scope(Scope.INFERENCE, Scope.JOIN)
    async def Discover(self, request: pb.DiscoverRequest, context: Context) -> pb.DiscoverResponse:  # noqa: N802
        if len(request.avoid) > MAX_AVOIDED:
            raise InvalidRequest(f"more than {MAX_AVOIDED} workers to avoid")
        if not request.host and not request.HasField("caller") and context.peer().startswith(LOOPBACK):
            request.host = host_identity()  # it is on this machine
        return await self._discovery.find(request, _principal(request))


def _principal(request: pb.DiscoverRequest) -> Principal:
    """Who asks: whoever calls, or whom a gateway tells that it admitted."""
    calling = caller()
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
