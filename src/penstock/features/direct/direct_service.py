"""The manager's gRPC service that finds workers for direct clients, called by clients or by gateways for them."""

from math import inf

from penstock.core.errors import Forbidden, InvalidRequest
from penstock.core.principals import INFERENCE_SCOPES, KeyLimits, Principal, Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import UNIX_PREFIX, Context, get_caller, get_peer
from penstock.features.direct.discovery import Discovery
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import access_pb2_grpc
from penstock.wire.sockets import read_host_identity

LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", UNIX_PREFIX)
MAX_AVOIDED = 256


class DirectService(access_pb2_grpc.DirectServicer):
    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    @needs_scope(Scope.INFERENCE, Scope.JOIN)
    async def Discover(self, request: pb.DiscoverRequest, context: Context) -> pb.DiscoverResponse:  # noqa: N802
        if len(request.avoid) > MAX_AVOIDED:
            raise InvalidRequest(f"`avoid` has {len(request.avoid)} workers; at most {MAX_AVOIDED} are allowed")
        if not request.host and not request.HasField("caller") and get_peer(context).startswith(LOOPBACK):
            request.host = read_host_identity()  # the caller is on this machine
        return await self._discovery.find(request, _find_client_principal(request))


def _find_client_principal(request: pb.DiscoverRequest) -> Principal:
    """Return the principal of the client: the caller itself, or the client for whom a gateway calls."""
    calling = get_caller()
    if not request.HasField("caller"):
        if not calling.may(INFERENCE_SCOPES):
            raise Forbidden(f"the key '{calling.name}' lacks the scope '{Scope.INFERENCE}'")
        return calling
    if not calling.may(frozenset((Scope.JOIN,))):
        raise Forbidden("only a gateway of the cluster may set `get_caller`; leave it out")
    client = request.caller
    limits = KeyLimits(**{field.name: value for field, value in client.limits.ListFields()})
    return Principal(
        client.name,
        client.key_id,
        INFERENCE_SCOPES,
        tuple(client.models),
        tuple(client.blocks),
        limits if client.HasField("limits") else None,
        client.expires_at or inf,
    )
