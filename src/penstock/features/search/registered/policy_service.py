"""The gRPC service of registered policies. Every manager answers reads; only the leader makes changes."""

# ruff: noqa: N802 - the names are those of the protocol

from penstock.core.errors import Forbidden
from penstock.core.principals import Scope
from penstock.endpoints.guard import needs_scope
from penstock.endpoints.guarded_server import Context, current_call
from penstock.features.search.registered.policy_record import PolicyRecord
from penstock.features.search.registered.policy_registry import PolicyRegistry
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1 import cluster_pb2_grpc


class PolicyService(cluster_pb2_grpc.PoliciesServicer):
    def __init__(self, registry: PolicyRegistry) -> None:
        self._registry = registry

    @needs_scope(Scope.ADMIN)
    async def PushPolicy(self, request: pb.PushPolicyRequest, context: Context) -> pb.PushPolicyResponse:
        caller = _check_caller()
        record = await self._registry.push(request.name, request.code, request.description, caller)
        return pb.PushPolicyResponse(policy=_to_status(record))

    @needs_scope(Scope.METRICS)
    async def ListPolicies(self, request: pb.ListPoliciesRequest, context: Context) -> pb.ListPoliciesResponse:
        return pb.ListPoliciesResponse(policies=[_to_status(each) for each in self._registry.all()])

    @needs_scope(Scope.ADMIN)
    async def DeletePolicy(self, request: pb.DeletePolicyRequest, context: Context) -> pb.DeletePolicyResponse:
        _check_caller()
        await self._registry.delete(request.name)
        return pb.DeletePolicyResponse()


def _check_caller() -> str:
    """Return the caller's name. Raise Forbidden if the key is limited to some models: policies see all models."""
    call = current_call.get()
    if call is None:
        return ""
    if call.principal.is_restricted:
        raise Forbidden(f"the key '{call.principal.name}' is limited to some models, and a policy ranks all of them")
    return call.principal.name


def _to_status(record: PolicyRecord) -> pb.PolicyStatus:
    return pb.PolicyStatus(
        name=record.name,
        sha256=record.sha256,
        size_bytes=len(record.code.encode()),
        description=record.description,
        created_at=record.created_at,
        created_by=record.created_by,
    )
