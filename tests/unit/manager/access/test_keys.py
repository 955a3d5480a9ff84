"""Keys of a cluster: made, known to gateways, revoked, rotated; every method of a manager's door asks for one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.waiting import until
from penstock.access.guard import Guard
from penstock.access.keys import KeyChanges, KeyRecord, KeyTable
from penstock.core.blocks import ClusterPicture, GatewayMember
from penstock.core.errors import Conflict, NameTaken
from penstock.core.principals import Principal, Scope
from penstock.manager.access.audit import Audit, AuditedStore
from penstock.manager.access.door import Acting, GuardedDoor, acting
from penstock.manager.access.keys import KEYS, SECRET, Keys
from penstock.manager.access.service import AccessService
from penstock.manager.direct.signing import Signing
from penstock.manager.manager import Manager
from penstock.manager.server import serve_manager
from penstock.pb.v1 import access_pb2 as pb
from penstock.pb.v1 import (
    access_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    leader_pb2_grpc,
    manager_pb2,
    manager_pb2_grpc,
)
from penstock.storage.metadata.base import Write
from penstock.storage.metadata.sqlite import SqliteMetadataStore
from penstock.wire.channels import Channels
from penstock.wire.control import ASKED_BY, CALLERS_KEY, RemoteControl
from penstock.wire.leader import Leader, SoleManager


class Door:
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
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    store = await SqliteMetadataStore.open(tmp_path / "metadata.db")
    manager = Manager(store, is_fresh=True)
    guard = Guard()
    keys, audit = Keys(manager, guard), Audit(manager, store)
    await manager.start()
    socket = f"unix:{tmp_path / 'manager.sock'}"
    ports: list[int] = []

    def add(door: GuardedDoor) -> None:
        service = AccessService(keys, audit, Signing(manager, 1e9))
        access_pb2_grpc.add_AccessServicer_to_server(service, door)
        ports.append(door._server.add_insecure_port("127.0.0.1:0"))

    server = await serve_manager(manager, socket, further=(add,), guard=guard)
    yield Door(manager, keys, audit, ports[0], socket)
    await server.stop(None)
    await manager.close()
    await store.close()


def wanted(name: str, *scopes: Scope, **fields: Any) -> KeyRecord:
    return KeyRecord(key_id="key", name=name, digest="", scopes=frozenset(scopes), **fields)


async def test_doors_ask_from_the_first_key_on_and_never_again_open(door: Door) -> None:
    status = (cluster_pb2_grpc.ClusterStub, "Status", cluster_pb2.StatusRequest())
    assert await door.code(*status) is grpc.StatusCode.OK, "nobody has made a key"
    made = await door.keys.create(wanted("ops", Scope.ADMIN))
    assert await door.code(*status) is grpc.StatusCode.UNAUTHENTICATED
    assert await door.code(*status, key="psk_wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert await door.code(*status, key=made.text) is grpc.StatusCode.OK
    await door.keys.revoke("ops")
    assert await door.code(*status, key=made.text) is grpc.StatusCode.UNAUTHENTICATED
    assert await door.code(*status) is grpc.StatusCode.UNAUTHENTICATED, "a key was made once"
    async with grpc.aio.insecure_channel(door.socket) as channel:
        answer = await access_pb2_grpc.AccessStub(channel).ListKeys(pb.ListKeysRequest(), timeout=5)
    assert [(key.spec.name, key.state) for key in answer.keys] == [("ops", "revoked")], "the operator's socket is open"


async def test_every_method_of_every_service_asks_for_its_scope(door: Door) -> None:
    keys = {scope: (await door.keys.create(wanted(str(scope), scope))).text for scope in Scope}
    stubs = (
        access_pb2_grpc.AccessStub,
        cluster_pb2_grpc.ClusterStub,
        leader_pb2_grpc.LeadersStub,
        manager_pb2_grpc.ManagerStub,
    )
    refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    for stub in stubs:
        async with (
            Channels().open(door.address) as nobody,
            Channels(keys[Scope.INFERENCE]).open(door.address) as caller,
        ):
            for method in vars(stub(nobody)):
                for channel, code in ((nobody, refused[0]), (caller, refused[1])):
                    if (stub, method, code) == (leader_pb2_grpc.LeadersStub, "Leader", refused[1]):
                        continue  # whoever has a key may ask who leads
                    assert await _code(getattr(stub(channel), method)) is code, (stub, method)
    revoke = (access_pb2_grpc.AccessStub, "RevokeKey", pb.RevokeKeyRequest(key="nobody's"))
    for scope, text in keys.items():
        allowed = grpc.StatusCode.OK if scope is Scope.ADMIN else grpc.StatusCode.PERMISSION_DENIED
        assert await door.code(*revoke, key=text) is allowed, scope


async def _code(method: Any) -> grpc.StatusCode:
    """Of a call with nothing in it, of whichever kind it is."""
    for given in (b"", iter(())):
        try:
            call = method(given, timeout=5)
            return await call.code()
        except (TypeError, AttributeError, AssertionError):
            continue
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError(method)


async def test_keys_are_shown_once_and_kept_as_a_keyed_hash(door: Door) -> None:
    spec = pb.KeySpec(name="app", scopes=["inference"], models=["mini*"], limits=pb.LimitsOfKey(requests_per_s=5))
    async with grpc.aio.insecure_channel(door.socket) as channel:
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
    assert (shown.key.spec.limits.burst_s, evenly.key.spec.limits.burst_s) == (1.0, 0.0), "what is said counts"
    kept = b"".join(door.manager.desired.others.values())
    assert made.text.encode() not in kept
    assert made.text.removeprefix("psk_").encode() not in kept
    assert SECRET in door.manager.desired.others
    record = json.loads(door.manager.desired.others[KEYS + made.key.key_id])
    assert (record["name"], len(bytes.fromhex(record["digest"]))) == ("app", 32)


async def test_a_rotated_key_has_two_texts_for_a_while(door: Door) -> None:
    first = await door.keys.create(wanted("ops", Scope.METRICS))
    second = await door.keys.rotate("ops", grace_s=60)
    third = await door.keys.rotate("ops", grace_s=0)
    status = (cluster_pb2_grpc.ClusterStub, "Status", cluster_pb2.StatusRequest())
    codes = [await door.code(*status, key=made.text) for made in (first, second, third)]
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    assert codes == [unauthenticated, unauthenticated, grpc.StatusCode.OK]
    assert first.record.key_id == third.record.key_id


async def test_gateways_hear_of_keys_and_of_their_end(door: Door) -> None:
    heard: asyncio.Queue[ClusterPicture] = asyncio.Queue()
    leader = Leader(SoleManager(door.socket))
    control = RemoteControl(leader, GatewayMember("gateway-0", "tcp://127.0.0.1:1", ""), heard.put_nowait)
    try:

        async def table() -> KeyTable:
            return KeyTable.of((await asyncio.wait_for(heard.get(), 5)).access)

        assert not (await table()).is_asking
        made = await door.keys.create(wanted("app", Scope.INFERENCE, models=("mini*",)))
        while not (known := await table()).is_asking:
            pass
        found = known.find(made.text)
        assert found is not None
        assert (found.name, found.models, found.scopes) == ("app", ("mini*",), frozenset({Scope.INFERENCE}))
        before = control._access
        control._take_access(manager_pb2.ClusterView(is_snapshot=True))
        assert control._access is before, "everything of a manager that knows nothing of keys opens no door"
        await door.keys.revoke("app")
        while (known := await table()).find(made.text) is not None:
            pass
        assert known.is_asking
        assert not door.manager.desired.others.keys() & {f"audit/{number:020}" for number in range(9)}, (
            "roles change nothing"
        )
    finally:
        await control.close()
        await leader.close()


async def test_what_a_gateway_asks_is_kept_with_whom_it_admitted(door: Door) -> None:
    """And nobody but a part of the cluster may say for whom it acts."""
    made = await door.keys.create(wanted("ops", Scope.ADMIN))
    for address, name in ((door.socket, "one"), (door.address, "two")):
        create = pb.CreateKeyRequest(spec=pb.KeySpec(name=name, scopes=["inference"]))
        async with Channels(made.text).open(address) as channel:
            metadata = ((ASKED_BY, "téam".encode()),)
            await access_pb2_grpc.AccessStub(channel).CreateKey(create, timeout=5, metadata=metadata)
    audit = await door.call(access_pb2_grpc.AccessStub, "ListAudit", pb.ListAuditRequest(), key=made.text)
    assert [entry.who for entry in audit.entries] == ["téam", "ops"]


async def test_what_is_changed_is_kept_with_who_did_it(door: Door) -> None:
    made = await door.keys.create(wanted("ops", Scope.ADMIN))
    create = pb.CreateKeyRequest(spec=pb.KeySpec(name="app", scopes=["inference"]))
    await door.call(access_pb2_grpc.AccessStub, "CreateKey", create, key=made.text)
    await door.call(access_pb2_grpc.AccessStub, "RevokeKey", pb.RevokeKeyRequest(key="app"), key=made.text)
    audit = await door.call(access_pb2_grpc.AccessStub, "ListAudit", pb.ListAuditRequest(), key=made.text)
    assert [(entry.who, entry.what) for entry in audit.entries] == [
        ("ops", "Access.CreateKey"),
        ("ops", "Access.RevokeKey"),
    ]
    created, revoked = (entry.changes[0] for entry in audit.entries)
    assert (created.before, json.loads(created.after)["name"]) == ("", "app")
    assert "revoked_at" not in json.loads(revoked.before)
    assert "revoked_at" in json.loads(revoked.after)
    assert "digest" not in created.after


async def test_a_key_is_changed_by_whoever_has_read_it_last(door: Door) -> None:
    made = await door.keys.create(wanted("app", Scope.INFERENCE, models=("mini*",), expires_at=9e9))
    async with grpc.aio.insecure_channel(door.socket) as channel:
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


async def test_what_any_manager_writes_is_kept_with_who_asked(door: Door) -> None:
    store = AuditedStore(door.store, door.audit)
    await store.commit([Write("models/m/aliases/a", b'{"version": "1"}')])
    assert door.audit.read() == [], "nobody asked for it"
    context = copy_context()
    context.run(acting.set, Acting(Principal("ci"), "PUT /v1/registry"))
    loop = asyncio.get_running_loop()
    await loop.create_task(store.commit([Write("models/m/aliases/b", b'{"version": "2"}')]), context=context)
    await loop.create_task(store.delete("models/m/aliases/a"), context=context)
    with pytest.raises(Conflict):
        await loop.create_task(store.delete("models/m/aliases/b", expected=1), context=context)
    await until(lambda: len(door.audit.read()) == 2)
    told = [
        (entry.who, change.key, change.before, change.after)
        for _, entry in door.audit.read()
        for change in entry.changes
    ]
    assert told == [
        ("ci", "models/m/aliases/b", "", '{"version":"2"}'),
        ("ci", "models/m/aliases/a", '{"version":"1"}', ""),
    ]
    newest, oldest = door.audit.read()[1][0], door.audit.read()[0][0]
    assert [number for number, _ in door.audit.read(before=newest)] == [oldest]
    door.audit._entries[newest + 1] = b'{"of": "another version"}'
    assert [number for number, _ in door.audit.read()] == [oldest, newest]


async def test_keys_are_watched_by_admins_alone(door: Door) -> None:
    keys = {scope: (await door.keys.create(wanted(str(scope), scope))).text for scope in (Scope.ADMIN, Scope.METRICS)}
    request = cluster_pb2.WatchClusterRequest(kinds=["keys"])
    codes = []
    for key in keys.values():
        async with Channels(key).open(door.address) as channel:
            stream = cluster_pb2_grpc.ClusterStub(channel).WatchCluster(request, timeout=5)
            try:
                codes.append((await stream.read()).is_snapshot)
                stream.cancel()
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
    assert codes == [True, grpc.StatusCode.PERMISSION_DENIED]


async def test_who_watches_with_a_key_that_is_revoked_hears_no_more(door: Door) -> None:
    key = (await door.keys.create(wanted("watcher", Scope.METRICS))).text
    async with Channels(key).open(door.address) as channel:
        stream = cluster_pb2_grpc.ClusterStub(channel).WatchCluster(cluster_pb2.WatchClusterRequest(), timeout=30)
        assert (await stream.read()).is_snapshot
        await door.keys.revoke("watcher")
        with suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_of_keys_that_are_changed_at_once_none_is_lost(door: Door) -> None:
    made = await asyncio.gather(
        *(door.keys.create(wanted("app", Scope.ADMIN)) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in made) == ["MadeKey", "NameTaken"]
    changes = KeyChanges.model_validate_json('{"models": ["m*"]}')
    await asyncio.gather(
        door.keys.rotate("app", 60.0), door.keys.change("app", changes), door.keys.revoke("app"), return_exceptions=True
    )
    assert door.keys.find("app").revoked_at is not None
    assert door.keys.find("app").models == ("m*",)


async def test_a_key_that_is_passed_on_counts_in_place_of_the_channels(door: Door) -> None:
    scopes = (Scope.JOIN, Scope.ADMIN, Scope.INFERENCE)
    keys = {scope: (await door.keys.create(wanted(str(scope), scope))).text for scope in scopes}
    codes = []
    for opening, address in ((Channels(keys[Scope.JOIN]), door.address), (Channels(), door.socket)):
        async with opening.open(address) as channel:
            for key in (keys[Scope.ADMIN], keys[Scope.INFERENCE], "psk_wrong"):
                metadata = ((CALLERS_KEY, key.encode()), (ASKED_BY, b"somebody else"))
                request = pb.ChangeKeyRequest(key="join", changes='{"models": ["m*"]}')
                call = access_pb2_grpc.AccessStub(channel).ChangeKey(request, timeout=5, metadata=metadata)
                codes.append(await call.code())
    ok, forbidden, unknown = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
    assert codes == [ok, forbidden, unknown] * 2, "a machine's own socket asks, too, where a key is passed on"
    assert {entry.who for _, entry in door.audit.read()} == {"admin"}, "nobody may say that it is another"


async def test_the_first_key_is_made_on_the_managers_machine(door: Door) -> None:
    create = pb.CreateKeyRequest(spec=pb.KeySpec(name="first", scopes=["admin"]))
    refused = await door.call(access_pb2_grpc.AccessStub, "CreateKey", create)
    assert refused.failure.code == "forbidden", "whoever reaches an open door would shut it for all others"
    async with grpc.aio.insecure_channel(door.socket) as channel:
        made = await access_pb2_grpc.AccessStub(channel).CreateKey(create, timeout=5)
    assert made.text
