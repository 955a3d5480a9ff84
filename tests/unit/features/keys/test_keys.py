"""Keys of a cluster: created, published, revoked and rotated; every method of a manager's endpoint requires one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import copy_context
from math import inf
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.waiting import until
from penstock.core.blocks import ClusterView, GatewayMember
from penstock.core.errors import Conflict, NameTaken
from penstock.core.principals import Principal, Scope
from penstock.endpoints.guard import Guard
from penstock.endpoints.guarded_server import CurrentCall, GuardedServer, current_call
from penstock.features.keys.access_service import AccessService
from penstock.features.keys.audit import Audit, AuditedStore
from penstock.features.keys.key_table import KeyChanges, KeyRecord, KeyTable
from penstock.features.keys.keys import KEYS, SECRET, Keys
from penstock.features.keys.signing import Signing
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.manager import Manager
from penstock.manager.manager_server import serve_manager
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import (
    access_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    leader_pb2_grpc,
    manager_pb2,
    manager_pb2_grpc,
)
from penstock.storage.metadata.metadata_store import Write
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.channels import Channels
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from penstock.wire.manager_connection import ASKED_BY_HEADER, CALLERS_KEY_HEADER, ManagerConnection
from tests.managers import administration


class Endpoint:
    def __init__(self, manager: Manager, keys: Keys, audit: Audit, port: int, socket: str) -> None:
        self.manager, self.keys, self.audit = manager, keys, audit
        self.store = audit._store
        self.address, self.socket = f"127.0.0.1:{port}", socket

    async def call(self, stub: Any, method: str, request: Any, key: str = "") -> Any:
        async with Channels(key).open(self.address) as channel:
            return await getattr(stub(channel), method)(request, timeout=5)

    async def code(self, stub: Any, method: str, request: Any, key: str = "") -> grpc.StatusCode:
        try:
            await self.call(stub, method, request, key)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    guard, audit = Guard(), Audit(store)
    control = ControlPlane(store, plan_audit=audit.plan)
    keys = Keys(control, guard)
    manager = Manager(control, Deployer(control), [keys, audit], is_fresh=True)
    await manager.start()
    socket = f"unix:{tmp_path / 'manager.sock'}"
    ports: list[int] = []

    def add(endpoint: GuardedServer) -> None:
        service = AccessService(keys, audit, Signing(control, 1e9))
        access_pb2_grpc.add_AccessServicer_to_server(service, endpoint)
        ports.append(endpoint._server.add_insecure_port("127.0.0.1:0"))

    server = await serve_manager(manager, socket, services=(add, administration(manager)), guard=guard)
    yield Endpoint(manager, keys, audit, ports[0], socket)
    await server.stop(None)
    await manager.close()
    await store.close()


def wanted(name: str, *scopes: Scope, **fields: Any) -> KeyRecord:
    return KeyRecord(key_id="key", name=name, digest="", scopes=frozenset(scopes), **fields)


async def test_endpoints_require_keys_from_the_first_key_on_and_never_open_again(endpoint: Endpoint) -> None:
    status = (cluster_pb2_grpc.ClusterStub, "Status", cluster_pb2.StatusRequest())
    assert await endpoint.code(*status) is grpc.StatusCode.OK, "there is no key yet"
    made = await endpoint.keys.create(wanted("ops", Scope.ADMIN))
    assert await endpoint.code(*status) is grpc.StatusCode.UNAUTHENTICATED
    assert await endpoint.code(*status, key="psk_wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert await endpoint.code(*status, key=made.text) is grpc.StatusCode.OK
    await endpoint.keys.revoke("ops")
    assert await endpoint.code(*status, key=made.text) is grpc.StatusCode.UNAUTHENTICATED
    assert await endpoint.code(*status) is grpc.StatusCode.UNAUTHENTICATED, "there was a key once"
    async with grpc.aio.insecure_channel(endpoint.socket) as channel:
        answer = await access_pb2_grpc.AccessStub(channel).ListKeys(pb.ListKeysRequest(), timeout=5)
    assert [(key.spec.name, key.state) for key in answer.keys] == [("ops", "revoked")], (
        "the operator's socket requires no key"
    )


async def test_every_method_of_every_service_requires_its_scope(endpoint: Endpoint) -> None:
    keys = {scope: (await endpoint.keys.create(wanted(str(scope), scope))).text for scope in Scope}
    stubs = (
        access_pb2_grpc.AccessStub,
        cluster_pb2_grpc.ClusterStub,
        leader_pb2_grpc.LeadersStub,
        manager_pb2_grpc.ManagerStub,
    )
    refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    for stub in stubs:
        async with (
            Channels().open(endpoint.address) as nobody,
            Channels(keys[Scope.INFERENCE]).open(endpoint.address) as caller,
        ):
            for method in vars(stub(nobody)):
                for channel, code in ((nobody, refused[0]), (caller, refused[1])):
                    if (stub, method, code) == (leader_pb2_grpc.LeadersStub, "Leader", refused[1]):
                        continue  # every key may ask for the leader
                    assert await _code(getattr(stub(channel), method)) is code, (stub, method)
    revoke = (access_pb2_grpc.AccessStub, "RevokeKey", pb.RevokeKeyRequest(key="nobody's"))
    for scope, text in keys.items():
        allowed = grpc.StatusCode.OK if scope is Scope.ADMIN else grpc.StatusCode.PERMISSION_DENIED
        assert await endpoint.code(*revoke, key=text) is allowed, scope


async def _code(method: Any) -> grpc.StatusCode:
    """Return the status of a call with an empty message, unary or streamed."""
    for given in (b"", iter(())):
        try:
            call = method(given, timeout=5)
            return await call.code()
        except (TypeError, AttributeError, AssertionError):
            continue
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError(method)


async def test_keys_are_shown_once_and_kept_as_a_keyed_hash(endpoint: Endpoint) -> None:
    spec = pb.KeySpec(name="app", scopes=["inference"], models=["mini*"], limits=pb.LimitsOfKey(requests_per_s=5))
    async with grpc.aio.insecure_channel(endpoint.socket) as channel:
        stub = access_pb2_grpc.AccessStub(channel)
        made = await stub.CreateKey(pb.CreateKeyRequest(spec=spec), timeout=5)
        again = await stub.CreateKey(pb.CreateKeyRequest(spec=spec), timeout=5)
        unknown = await stub.CreateKey(pb.CreateKeyRequest(spec=pb.KeySpec(name="x", scopes=["root"])), timeout=5)
        shown = await stub.GetKey(pb.GetKeyRequest(key="app"), timeout=5)
        even = pb.KeySpec(name="even", scopes=["inference"], limits=pb.LimitsOfKey(requests_per_s=5, burst_s=0))
        evenly = await stub.CreateKey(pb.CreateKeyRequest(spec=even), timeout=5)
        missing = await stub.GetKey(pb.GetKeyRequest(key="other"), timeout=5)
    assert made.text.startswith("psk_")
    assert (again.failure.code, unknown.failure.code, missing.failure.code) == (
        NameTaken.code,
        "invalid_request",
        "not_found",
    )
    assert (shown.key.spec.models, shown.key.spec.limits.requests_per_s, shown.key.created_by) == (
        ["mini*"],
        5.0,
        "operator",
    )
    assert (shown.key.spec.limits.burst_s, evenly.key.spec.limits.burst_s) == (1.0, 0.0), "an explicit value is kept"
    kept = b"".join(endpoint.manager.control.desired.others.values())
    assert made.text.encode() not in kept
    assert made.text.removeprefix("psk_").encode() not in kept
    assert SECRET in endpoint.manager.control.desired.others
    record = json.loads(endpoint.manager.control.desired.others[KEYS + made.key.key_id])
    assert (record["name"], len(bytes.fromhex(record["digest"]))) == ("app", 32)


async def test_a_rotated_key_has_two_texts_for_a_while(endpoint: Endpoint) -> None:
    first = await endpoint.keys.create(wanted("ops", Scope.METRICS))
    second = await endpoint.keys.rotate("ops", grace_s=60)
    third = await endpoint.keys.rotate("ops", grace_s=0)
    status = (cluster_pb2_grpc.ClusterStub, "Status", cluster_pb2.StatusRequest())
    codes = [await endpoint.code(*status, key=made.text) for made in (first, second, third)]
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    assert codes == [unauthenticated, unauthenticated, grpc.StatusCode.OK]
    assert first.record.key_id == third.record.key_id


async def test_gateways_learn_of_new_and_revoked_keys(endpoint: Endpoint) -> None:
    heard: asyncio.Queue[ClusterView] = asyncio.Queue()
    leader = LeaderClient(FixedLeader(endpoint.socket))
    control = ManagerConnection(leader, GatewayMember("gateway-0", "tcp://127.0.0.1:1", ""), heard.put_nowait)
    try:

        async def table() -> KeyTable:
            return KeyTable.from_view((await asyncio.wait_for(heard.get(), 5)).access)

        assert not (await table()).needs_key
        made = await endpoint.keys.create(wanted("app", Scope.INFERENCE, models=("mini*",)))
        while not (known := await table()).needs_key:
            pass
        found = known.find(made.text)
        assert found is not None
        assert (found.name, found.models, found.scopes) == ("app", ("mini*",), frozenset({Scope.INFERENCE}))
        before = control._access
        control._apply_access(manager_pb2.ClusterView(is_snapshot=True))
        assert control._access is before, "a snapshot of a manager without keys opens no endpoint"
        await endpoint.keys.revoke("app")
        while (known := await table()).find(made.text) is not None:
            pass
        assert known.needs_key
        assert not endpoint.manager.control.desired.others.keys() & {f"audit/{number:020}" for number in range(9)}, (
            "changes by roles are not audited"
        )
    finally:
        await control.close()
        await leader.close()


async def test_workers_learn_which_keys_are_no_longer_valid(endpoint: Endpoint) -> None:
    made = [await endpoint.keys.create(wanted(name, Scope.INFERENCE)) for name in ("kept", "revoked", "deleted")]
    kept, revoked, deleted = (each.record.key_id for each in made)
    control = endpoint.manager.control
    await endpoint.keys.change("kept", KeyChanges(expires_at=2e9))
    await endpoint.keys.revoke("revoked")
    await control.commit([Write(f"keys/{deleted}", None)])
    tokens = control.term.publisher._tokens
    assert set(tokens.revoked) == {revoked, deleted}
    assert dict(tokens.expires_at) == {kept: 2e9}
    assert endpoint.keys.find_expiry(deleted) == endpoint.keys.find_expiry(revoked) == -inf


async def test_a_gateways_request_is_audited_with_its_caller(endpoint: Endpoint) -> None:
    """Only a part of the cluster may name another caller."""
    made = await endpoint.keys.create(wanted("ops", Scope.ADMIN))
    for address, name in ((endpoint.socket, "one"), (endpoint.address, "two")):
        create = pb.CreateKeyRequest(spec=pb.KeySpec(name=name, scopes=["inference"]))
        async with Channels(made.text).open(address) as channel:
            metadata = ((ASKED_BY_HEADER, "téam".encode()),)
            await access_pb2_grpc.AccessStub(channel).CreateKey(create, timeout=5, metadata=metadata)
    audit = await endpoint.call(access_pb2_grpc.AccessStub, "ListAudit", pb.ListAuditRequest(), key=made.text)
    assert [entry.who for entry in audit.entries] == ["téam", "ops"]


async def test_changes_are_audited_with_their_author(endpoint: Endpoint) -> None:
    made = await endpoint.keys.create(wanted("ops", Scope.ADMIN))
    create = pb.CreateKeyRequest(spec=pb.KeySpec(name="app", scopes=["inference"]))
    await endpoint.call(access_pb2_grpc.AccessStub, "CreateKey", create, key=made.text)
    await endpoint.call(access_pb2_grpc.AccessStub, "RevokeKey", pb.RevokeKeyRequest(key="app"), key=made.text)
    audit = await endpoint.call(access_pb2_grpc.AccessStub, "ListAudit", pb.ListAuditRequest(), key=made.text)
    assert [(entry.who, entry.what) for entry in audit.entries] == [
        ("ops", "Access.CreateKey"),
        ("ops", "Access.RevokeKey"),
    ]
    created, revoked = (entry.changes[0] for entry in audit.entries)
    assert (created.before, json.loads(created.after)["name"]) == ("", "app")
    assert "revoked_at" not in json.loads(revoked.before)
    assert "revoked_at" in json.loads(revoked.after)
    assert "digest" not in created.after


async def test_a_key_is_changed_only_at_its_current_revision(endpoint: Endpoint) -> None:
    made = await endpoint.keys.create(wanted("app", Scope.INFERENCE, models=("mini*",), expires_at=9e9))
    async with grpc.aio.insecure_channel(endpoint.socket) as channel:
        stub = access_pb2_grpc.AccessStub(channel)
        tag = (await stub.GetKey(pb.GetKeyRequest(key="app"), timeout=5)).key.etag
        changes = '{"scopes": ["inference", "metrics"], "expires_at": null, "limits": {"requests_per_s": 7}}'
        changed = await stub.ChangeKey(pb.ChangeKeyRequest(key="app", changes=changes, expected=tag), timeout=5)
        late = await stub.ChangeKey(pb.ChangeKeyRequest(key="app", changes="{}", expected=tag), timeout=5)
        stale = await stub.RevokeKey(pb.RevokeKeyRequest(key="app", expected=tag), timeout=5)
        wrong = [
            (await stub.ChangeKey(pb.ChangeKeyRequest(key="app", changes=given), timeout=5)).failure.code
            for given in (
                "",
                "[]",
                '{"scopes": []}',
                '{"scopes": ["root"]}',
                '{"limits": {"burst_s": -1}}',
                '{"digest": ""}',
            )
        ]
        current = await stub.RevokeKey(pb.RevokeKeyRequest(key="app", expected=changed.key.etag), timeout=5)
    assert (changed.key.spec.scopes, changed.key.spec.expires_at) == (["inference", "metrics"], 0.0)
    assert (changed.key.spec.models, changed.key.spec.limits.requests_per_s) == (["mini*"], 7.0)
    assert {late.failure.code, stale.failure.code} == {"precondition_failed"}
    assert set(wrong) == {"invalid_request"}
    assert (current.failure.code, current.key.state) == ("", "revoked")
    assert made.record.key_id == changed.key.key_id


async def test_writes_of_any_manager_are_audited_with_the_caller(endpoint: Endpoint) -> None:
    store = AuditedStore(endpoint.store, endpoint.audit)
    await store.commit([Write("models/m/aliases/a", b'{"version": "1"}')])
    assert endpoint.audit.read() == [], "no caller requested the change"
    context = copy_context()
    context.run(current_call.set, CurrentCall(Principal("ci"), "PUT /v1/registry"))
    loop = asyncio.get_running_loop()
    await loop.create_task(store.commit([Write("models/m/aliases/b", b'{"version": "2"}')]), context=context)
    await loop.create_task(store.delete("models/m/aliases/a"), context=context)
    with pytest.raises(Conflict):
        await loop.create_task(store.delete("models/m/aliases/b", expected=1), context=context)
    await until(lambda: len(endpoint.audit.read()) == 2)
    told = [
        (entry.who, change.key, change.before, change.after)
        for _, entry in endpoint.audit.read()
        for change in entry.changes
    ]
    assert told == [
        ("ci", "models/m/aliases/b", "", '{"version":"2"}'),
        ("ci", "models/m/aliases/a", '{"version":"1"}', ""),
    ]
    newest, oldest = endpoint.audit.read()[1][0], endpoint.audit.read()[0][0]
    assert [number for number, _ in endpoint.audit.read(before=newest)] == [oldest]
    endpoint.audit._entries[newest + 1] = b'{"of": "another version"}'
    assert [number for number, _ in endpoint.audit.read()] == [oldest, newest]


async def test_only_admins_can_watch_keys(endpoint: Endpoint) -> None:
    keys = {
        scope: (await endpoint.keys.create(wanted(str(scope), scope))).text for scope in (Scope.ADMIN, Scope.METRICS)
    }
    request = cluster_pb2.WatchClusterRequest(kinds=["keys"])
    codes = []
    for key in keys.values():
        async with Channels(key).open(endpoint.address) as channel:
            stream = cluster_pb2_grpc.ClusterStub(channel).WatchCluster(request, timeout=5)
            try:
                codes.append((await stream.read()).is_snapshot)
                stream.cancel()
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
    assert codes == [True, grpc.StatusCode.PERMISSION_DENIED]


async def test_a_watch_ends_when_its_key_is_revoked(endpoint: Endpoint) -> None:
    key = (await endpoint.keys.create(wanted("watcher", Scope.METRICS))).text
    async with Channels(key).open(endpoint.address) as channel:
        stream = cluster_pb2_grpc.ClusterStub(channel).WatchCluster(cluster_pb2.WatchClusterRequest(), timeout=30)
        assert (await stream.read()).is_snapshot
        await endpoint.keys.revoke("watcher")
        with suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_concurrent_changes_of_keys_are_all_kept(endpoint: Endpoint) -> None:
    made = await asyncio.gather(
        *(endpoint.keys.create(wanted("app", Scope.ADMIN)) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in made) == ["CreatedKey", "NameTaken"]
    changes = KeyChanges.model_validate_json('{"models": ["m*"]}')
    await asyncio.gather(
        endpoint.keys.rotate("app", 60.0),
        endpoint.keys.change("app", changes),
        endpoint.keys.revoke("app"),
        return_exceptions=True,
    )
    assert endpoint.keys.find("app").revoked_at is not None
    assert endpoint.keys.find("app").models == ("m*",)


async def test_a_forwarded_key_takes_precedence_over_the_channels_key(endpoint: Endpoint) -> None:
    scopes = (Scope.JOIN, Scope.ADMIN, Scope.INFERENCE)
    keys = {scope: (await endpoint.keys.create(wanted(str(scope), scope))).text for scope in scopes}
    codes = []
    for opening, address in ((Channels(keys[Scope.JOIN]), endpoint.address), (Channels(), endpoint.socket)):
        async with opening.open(address) as channel:
            for key in (keys[Scope.ADMIN], keys[Scope.INFERENCE], "psk_wrong"):
                metadata = ((CALLERS_KEY_HEADER, key.encode()), (ASKED_BY_HEADER, b"somebody else"))
                request = pb.ChangeKeyRequest(key="join", changes='{"models": ["m*"]}')
                call = access_pb2_grpc.AccessStub(channel).ChangeKey(request, timeout=5, metadata=metadata)
                codes.append(await call.code())
    ok, forbidden, unknown = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
    assert codes == [ok, forbidden, unknown] * 2, "a forwarded key is checked on the machine's own socket too"
    assert {entry.who for _, entry in endpoint.audit.read()} == {"admin"}, "no caller may give another name"


async def test_the_first_key_is_made_on_the_managers_machine(endpoint: Endpoint) -> None:
    create = pb.CreateKeyRequest(spec=pb.KeySpec(name="first", scopes=["admin"]))
    refused = await endpoint.call(access_pb2_grpc.AccessStub, "CreateKey", create)
    assert refused.failure.code == "forbidden", "a stranger who reaches an open endpoint could close it for all others"
    async with grpc.aio.insecure_channel(endpoint.socket) as channel:
        made = await access_pb2_grpc.AccessStub(channel).CreateKey(create, timeout=5)
    assert made.text
