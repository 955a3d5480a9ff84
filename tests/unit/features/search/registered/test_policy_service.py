"""Who may change registered policies, and that a version never changes."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.core.errors import Forbidden, InvalidRequest, NameTaken, NotFound
from penstock.core.principals import Principal, Scope
from penstock.endpoints.guarded_server import current_call
from penstock.features.search.registered.policy_record import MAX_POLICIES
from penstock.features.search.registered.policy_registry import PolicyRegistry
from penstock.features.search.registered.policy_service import PolicyService
from penstock.manager.control_plane import ControlPlane
from penstock.manager.desired_state import StateChanges
from penstock.pb.v1 import cluster_pb2 as pb

CODE = b"def rank(candidates, context): return []"


class Control:
    """The parts of a leading manager that the registry uses, with a dictionary as its store."""

    def __init__(self) -> None:
        self.desired = SimpleNamespace(others={"keys/k": b"{}"})
        self.events = SimpleNamespace(emit=lambda kind, subject, text: self.emitted.append(kind))
        self.term = SimpleNamespace(set_records=lambda records, prefix: self.published.append(sorted(records)))
        self.emitted: list[str] = []
        self.published: list[list[str]] = []
        self.registry: PolicyRegistry | None = None

    def check_leads(self) -> None: ...

    async def commit(self, writes: Any, compares: Any = ()) -> int:
        await asyncio.sleep(0)
        assert self.registry is not None
        for write in writes:
            self.desired.others.pop(write.key, None)
            if write.value is not None:
                self.desired.others[write.key] = write.value
            self.registry.state_changed(StateChanges(others={write.key: write.value}))
        return 1


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def service(control: Control) -> Iterator[PolicyService]:
    control.registry = PolicyRegistry(cast(ControlPlane, control), lambda: 5.0)
    call = SimpleNamespace(principal=Principal("boss", scopes=frozenset({Scope.ADMIN})))
    token = current_call.set(cast(Any, call))
    yield PolicyService(control.registry)
    current_call.reset(token)


async def push(service: PolicyService, name: str, code: bytes = CODE) -> pb.PolicyStatus:
    request = pb.PushPolicyRequest(name=name, code=code, description="d")
    return (await service.PushPolicy(request, cast(Any, None))).policy


async def names(service: PolicyService) -> list[str]:
    found = await service.ListPolicies(pb.ListPoliciesRequest(), cast(Any, None))
    return [each.name for each in found.policies]


async def test_policies_are_pushed_published_listed_and_deleted(service: PolicyService, control: Control) -> None:
    pushed = await push(service, "near:v1")
    assert (pushed.size_bytes, pushed.created_by, pushed.created_at, pushed.description) == (
        len(CODE),
        "boss",
        5.0,
        "d",
    )
    assert await push(service, "near:v1") == pushed
    assert await names(service) == ["near:v1"]
    with pytest.raises(NameTaken, match="another version"):
        await push(service, "near:v1", CODE + b"\n")
    await service.DeletePolicy(pb.DeletePolicyRequest(name="near:v1"), cast(Any, None))
    assert control.published == [["policies/near:v1"], []]
    assert control.emitted == ["policy_pushed", "policy_deleted"]
    with pytest.raises(NotFound, match="registered policies: none"):
        await service.DeletePolicy(pb.DeletePolicyRequest(name="near:v1"), cast(Any, None))


async def test_the_number_of_policies_is_bounded(service: PolicyService) -> None:
    for number in range(MAX_POLICIES):
        await push(service, f"p:v{number}")
    with pytest.raises(InvalidRequest, match=f"{MAX_POLICIES} policies"):
        await push(service, "p:last")


async def test_a_key_that_is_limited_to_some_models_may_not_change_policies(service: PolicyService) -> None:
    limited = Principal("limited", scopes=frozenset({Scope.ADMIN}), models=("mini*",))
    current_call.set(cast(Any, SimpleNamespace(principal=limited)))
    with pytest.raises(Forbidden, match="'limited'"):
        await push(service, "near:v1")
    with pytest.raises(Forbidden, match="'limited'"):
        await service.DeletePolicy(pb.DeletePolicyRequest(name="near:v1"), cast(Any, None))
