"""The administration of a cluster over HTTP, with real managers behind it."""

import asyncio
import hashlib
import json
import socket
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.waiting import until
from penstock.core.cluster.manager_records import LeaderRecord
from penstock.core.principals import Scope
from penstock.features.keys.key_table import KeyRecord
from penstock.manager.term import WorkerLoad
from penstock.pb.v1 import cluster_pb2 as pb
from penstock.pb.v1.cluster_pb2_grpc import ClusterStub
from penstock.wire.manager_connection import CALLERS_KEY_HEADER
from tests.unit.features.admin.conftest import Place


async def test_a_block_is_deployed_scaled_explained_and_removed(place: Place) -> None:
    await place.join("w1", cpus=4.0)
    made = await place.call("POST", "/blocks", {"model": "m", "version": "1", "is_beside": True, "metadata": {"a": 1}})
    assert made.status_code == 201, made.text
    location = made.headers["location"].removeprefix("/v1/admin")
    block = await place.call("GET", location)
    assert (block.json()["spec"]["metadata"], block.json()["role"]) == ({"a": 1}, "chosen")
    changed = await place.call("PATCH", location, {"replicas": 3}, if_match=block.headers["etag"])
    assert (changed.status_code, changed.json()["spec"]["replicas"]) == (200, 3)
    assert changed.headers["etag"] != block.headers["etag"]
    late = await place.call("PATCH", location, {"replicas": 4}, if_match=block.headers["etag"])
    assert (late.status_code, late.json()["error"]["code"]) == (412, "precondition_failed")
    assert late.headers["penstock-code"] == "precondition_failed"
    assert (await place.call("DELETE", location, if_match=block.headers["etag"])).status_code == 412
    explained = await place.get(f"{location}/explanation")
    assert any("w1" in sentence for sentence in explained["sentences"])
    assert (await place.call("DELETE", location)).status_code == 204
    gone = await place.call("GET", location)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "unknown_model")


async def test_an_unchanged_worker_is_answered_with_304(place: Place) -> None:
    await place.join("w1")
    first = await place.call("GET", "/workers/w1")
    assert (await place.call("GET", "/workers/w1", if_none_match=first.headers["etag"])).status_code == 304
    await place.work("w1", WorkerLoad(cpu=2.0))
    again = await place.call("GET", "/workers/w1", if_none_match=first.headers["etag"])
    assert again.status_code == 304, "figures do not change the ETag"
    drained = await place.call("PATCH", "/workers/w1", {"is_draining": True}, if_match=first.headers["etag"])
    assert drained.json()["is_draining"] is True
    assert (await place.call("GET", "/workers/w1", if_none_match=first.headers["etag"])).status_code == 200
    labelled = await place.call("PATCH", "/workers/w1", {"labels": {"disk": "ssd"}, "is_draining": False})
    assert (labelled.json()["facts"]["labels"], labelled.json()["is_draining"]) == ({"disk": "ssd"}, False)
    for path in ("/models/m", f"/events/{(await place.get('/events'))['items'][0]['number']}"):
        told = await place.call("GET", path)
        assert (await place.call("GET", path, if_none_match=told.headers["etag"])).status_code == 304
    assert (await place.call("DELETE", "/workers/w1")).status_code == 204
    assert (await place.call("GET", "/workers/nobody")).status_code == 404


async def test_pages_are_complete_despite_changes_between_them(place: Place) -> None:
    for number in range(1, 8):
        await place.join(f"w{number}")
    seen, cursor = [], ""
    while cursor is not None:
        page = await place.get("/workers", limit=2, **({"cursor": cursor} if cursor else {}))
        seen += [worker["worker_id"] for worker in page["items"]]
        cursor = page["next_cursor"]
        if len(seen) == 2:
            assert (await place.call("DELETE", "/workers/w2")).status_code == 204  # it was sent already
            await place.join("w0")  # sorted before the next page
    assert seen == [f"w{number}" for number in range(1, 8)]

    for subject in "abcde":
        place.manager.control.events.emit("test", subject, "")
    await until(lambda: len(place.manager.control.events.read(kind="test")) == 5)
    first = await place.get("/events", kind="test", limit=2)
    place.manager.control.events.emit("test", "f", "")
    await until(lambda: len(place.manager.control.events.read(kind="test")) == 6)
    second = await place.get("/events", kind="test", limit=4, cursor=first["next_cursor"])
    assert [event["subject"] for event in first["items"] + second["items"]] == list("edcba")
    for wrong in ({"limit": "0"}, {"limit": "many"}, {"cursor": "%%%"}, {"cursor": first["next_cursor"]}):
        answer = await place.http.get("/v1/admin/blocks", params=wrong)
        assert answer.status_code == 400, wrong


async def test_keys_are_made_changed_rotated_and_revoked_and_all_of_it_is_audited(place: Place) -> None:
    ops = await place.key("ops", Scope.ADMIN)
    made = await place.call("POST", "/keys", {"name": "app", "models": ["mini*"], "limits": {"rows_per_s": 5}}, ops)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    assert made.json()["text"].startswith("psk_")
    path = made.headers["location"].removeprefix("/v1/admin")
    shown = await place.call("GET", path, key=ops)
    assert "text" not in shown.json()
    changed = await place.call("PATCH", path, {"scopes": ["metrics"]}, ops, if_match=shown.headers["etag"])
    assert (changed.json()["spec"]["scopes"], changed.json()["spec"]["models"]) == (["metrics"], ["mini*"])
    assert (await place.call("GET", "/status", key=made.json()["text"])).status_code == 200, "the key now has the scope"
    rotated = await place.call("POST", "/keys/app/rotate", {"grace_s": 60}, ops, if_match=changed.headers["etag"])
    assert rotated.json()["text"] not in ("", made.json()["text"])
    assert (await place.call("POST", "/keys", {"name": "app"}, ops)).status_code == 409
    assert (await place.call("DELETE", "/keys/app", key=ops, if_match=changed.headers["etag"])).status_code == 412
    assert (await place.call("DELETE", "/keys/app", key=ops)).status_code == 204
    assert [key["spec"]["name"] for key in (await place.get("/keys", ops, state="valid"))["items"]] == ["ops"]
    audit = (await place.get("/audit", ops, who="ops"))["items"]
    methods = ["Access.RevokeKey", "Access.RotateKey", "Access.ChangeKey", "Access.CreateKey"]
    assert [entry["what"] for entry in audit] == methods
    assert json.loads(audit[2]["changes"][0]["before"])["scopes"] == ["inference"]
    assert made.json()["text"] not in json.dumps(audit)
    assert (await place.call("GET", f"/audit/{audit[0]['number']}", key=ops)).json() == audit[0]


async def test_a_rollout_is_started_paused_and_undone(place: Place) -> None:
    await place.join("w1")
    plan = {"name": "m", "new": "1", "steps": [50, 100], "hold_s": 600, "min_answers": 0}
    started = await place.call("POST", "/rollouts", plan)
    assert (started.status_code, started.json()["plan"]["hold_s"]) == (201, 600)
    paused = await place.call("POST", "/rollouts/m/pause")
    assert paused.json()["is_paused"] is True
    stale = await place.call("POST", "/rollouts/m/undo", if_match=started.headers["etag"])
    assert stale.status_code == 412
    assert (await place.call("DELETE", "/rollouts/m")).status_code == 400, "the rollout is not finished"
    undone = await place.call("POST", "/rollouts/m/undo")
    assert undone.json()["phase"] == "undone"
    assert [rollout["name"] for rollout in (await place.get("/rollouts"))["items"]] == ["m"]
    assert (await place.call("DELETE", "/rollouts/m")).status_code == 204
    assert (await place.call("GET", "/rollouts/m")).status_code == 404


async def test_models_and_sessions_are_listed(place: Place) -> None:
    models = (await place.get("/models", limit=1))["items"]
    assert [(model["model"], model["versions"]) for model in models] == [("m", [])]
    assert {block["spec"]["model"] for block in models[0]["blocks"]} == {"m"}
    assert (await place.call("GET", "/models/other")).status_code == 404
    assert (await place.get("/sessions"))["items"] == []
    assert (await place.get("/status"))["is_leader"] is True


WRONG: list[tuple[str, str, Any]] = [
    ("POST", "/blocks", {"model": "m", "replica": 1}),
    ("POST", "/blocks", {"model": "m", "replicas": -1}),
    ("POST", "/blocks", []),
    ("PATCH", "/workers/w1", {"labels": 3}),
    ("POST", "/keys", {"name": "x", "scopes": ["root"]}),
    ("POST", "/keys", {"name": ""}),
    ("POST", "/rollouts", {"name": "m", "new": "1", "steps": [9, 3]}),
]


async def test_invalid_requests_are_refused(place: Place) -> None:
    for method, path, body in WRONG:
        answer = await place.call(method, path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), (method, path, body)


async def test_every_route_declares_its_scopes_and_enforces_them(place: Place) -> None:
    document = (await place.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    keys = {scope: await place.key(str(scope), scope) for scope in (Scope.INFERENCE, Scope.METRICS)}
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(_references(document)) <= schemas
    routes = [(path, method, route) for path, found in document["paths"].items() for method, route in found.items()]
    assert len(routes) > 45, "the routes include those of the registry"
    for path, method, route in routes:
        needed = set(route["security"][0]["bearer"])
        concrete = path.format(**{part["name"]: "0" for part in route["parameters"] if part["in"] == "path"})
        assert (await place.http.request(method, concrete)).status_code == 401, (method, path)
        for scope, key in keys.items():
            if scope not in needed:
                refused = await place.http.request(method, concrete, headers={"x-api-key": key})
                assert refused.status_code == 403, (method, path, scope)
    assert (await place.http.get("/docs", headers={"x-api-key": keys[Scope.METRICS]})).status_code == 200
    assert (await place.http.get("/v1/admin/nothing")).status_code == 404


def _references(document: Any) -> list[str]:
    if isinstance(document, dict):
        own = [document["$ref"]] if isinstance(document.get("$ref"), str) else []
        return own + [ref for value in document.values() for ref in _references(value)]
    return [ref for value in document for ref in _references(value)] if isinstance(document, list) else []


async def test_any_manager_answers_and_forwards_writes(place: Place, follower: Place) -> None:
    await place.join("w1")
    ops = await place.key("ops", Scope.ADMIN)
    await until(lambda: bool(follower.keys.list_keys()))
    status = await follower.get("/status", ops)
    assert status["is_leader"] is True, "the leader's answer is forwarded"
    assert [worker["state"] for worker in (await follower.get("/workers", ops))["items"]] == ["alive"]
    made = await follower.call("POST", "/keys", {"name": "app"}, ops)
    assert made.status_code == 201, made.text
    assert (await follower.call("PATCH", "/workers/w1", {"is_draining": True}, ops)).json()["is_draining"] is True
    denied = await follower.call("PATCH", "/workers/w1", {"is_draining": False}, made.json()["text"])
    assert denied.status_code in (401, 403)
    audit = (await follower.get("/audit", ops))["items"]
    assert [(entry["who"], entry["what"]) for entry in audit[:2]] == [
        ("ops", "Cluster.ChangeWorker"),
        ("ops", "Access.CreateKey"),
    ]


async def test_a_key_for_some_models_sees_no_others(place: Place) -> None:
    wanted = KeyRecord(key_id="key", name="bound", digest="", scopes=frozenset({Scope.ADMIN}), models=("m*",))
    bound = (await place.keys.create(wanted)).text
    other = next(
        block for block in place.manager.control.term.blocks.list_shown_blocks() if block.model == "n"
    ).block_id
    assert {block["spec"]["model"] for block in (await place.get("/blocks", bound))["items"]} == {"m"}
    assert [model["model"] for model in (await place.get("/models", bound))["items"]] == ["m"]
    for method, path, body in (
        ("GET", f"/blocks/{other}", None),
        ("PATCH", f"/blocks/{other}", {"replicas": 1}),
        ("DELETE", f"/blocks/{other}", None),
        ("GET", "/models/n", None),
        ("POST", "/models/n/unload", None),
        ("POST", "/blocks", {"model": "n"}),
    ):
        refused = await place.call(method, path, body, bound)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_model"), (method, path)
    assert place.manager.control.election.leader is not None
    shown = ((CALLERS_KEY_HEADER, bound.encode()),)
    async with grpc.aio.insecure_channel(place.manager.control.election.leader.address) as channel:
        stub: Any = ClusterStub(channel)
        listed = await stub.ListBlocks(pb.ListBlocksRequest(), metadata=shown, timeout=10)
        removed = await stub.RemoveBlock(pb.RemoveBlockRequest(block_id=other), metadata=shown, timeout=10)
    assert ({block.spec.model for block in listed.blocks}, removed.failure.code) == ({"m"}, "unknown_model")
    plan = {"name": "m", "new": other, "steps": [100], "hold_s": 0, "min_answers": 0}
    assert (await place.call("POST", "/rollouts", plan, bound)).status_code == 404
    plan = {"name": "n", "new": "1", "steps": [50, 100], "hold_s": 600, "min_answers": 0}
    ops = await place.key("ops", Scope.ADMIN)
    assert (await place.call("POST", "/rollouts", plan, ops)).status_code == 201
    assert (await place.get("/rollouts", bound))["items"] == []
    assert (await place.call("POST", "/rollouts/n/undo", key=bound)).status_code == 404
    alias = "/v1/registry/models/n/aliases/best"
    assert (await place.http.put(alias, json={"version": "1"}, headers={"x-api-key": bound})).status_code == 403


async def test_uploads_to_the_registry_are_audited(place: Place) -> None:
    key = await place.key("ci", Scope.UPLOAD)
    ops = await place.key("ops", Scope.ADMIN)
    files = {"model.yaml": b"task: tensor\n", "1/model.onnx": b"never read here"}
    described = [
        {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in files.items()
    ]
    shown = {"x-api-key": key}
    begun = await place.http.post("/v1/registry/models/up/versions/1", json={"files": described}, headers=shown)
    upload = begun.headers["location"]
    for data in files.values():
        headers = {**shown, "content-type": "application/offset+octet-stream", "upload-offset": "0"}
        path = f"{upload}/files/{hashlib.sha256(data).hexdigest()}"
        assert (await place.http.patch(path, content=data, headers=headers)).status_code == 204
    assert (await place.http.post(f"{upload}/commit", headers=shown)).status_code == 201
    alias = "/v1/registry/models/up/aliases/best"
    named = await place.http.put(alias, json={"version": "1"}, headers={"x-api-key": ops})
    assert named.status_code == 204, named.text
    model = await place.get("/models/up", ops)
    assert [(each["version"], sorted(each["aliases"])) for each in model["versions"]] == [("1", ["best", "latest"])]
    audit = (await place.get("/audit", ops))["items"]
    assert [(each["who"], each["changes"][0]["key"]) for each in audit[:2]] == [
        ("ops", "models/up/aliases/best"),
        ("ci", "models/up/versions/1"),
    ]


async def test_pages_of_allowed_origins_have_access_and_others_do_not(place: Place) -> None:
    asking = {"access-control-request-method": "PATCH", "access-control-request-headers": "if-match, x-api-key"}
    for origin, code in (("https://ui.example", 200), ("https://other.example", 400)):
        asked = await place.http.options("/v1/admin/blocks/b", headers={"origin": origin, **asking})
        assert asked.status_code == code, origin
    answer = await place.http.get("/v1/admin/status", headers={"origin": "https://ui.example"})
    assert answer.headers["access-control-allow-origin"] == "https://ui.example"
    assert "etag" in answer.headers["access-control-expose-headers"]
    acting = await place.http.post("/v1/admin/keys", json={"name": "x"}, headers={"origin": "https://other.example"})
    assert (acting.status_code, acting.json()["error"]["code"]) == (403, "forbidden")


# --- the WebSocket


async def _until_told(socket: ClientConnection, is_it: Any) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            message: dict[str, Any] = json.loads(await socket.recv())
            if is_it(message):
                return message


async def test_changes_and_figures_are_pushed(place: Place, follower: Place) -> None:
    for asked in (place, follower):
        async with connect(f"ws://{asked.address}/v1/admin/watch") as socket:
            first = json.loads(await socket.recv())
            assert first["type"] == "snapshot"
            assert {block["spec"]["model"] for block in first["blocks"]} == {"m", "n"}
            assert {"workers", "keys", "rollouts", "events"} <= first.keys()
            figures = await _until_told(socket, lambda message: message["type"] == "metrics")
            assert {block["model"] for block in figures["cluster"]["blocks"]} == {"m", "n"}
            worker = "w1" if asked is place else "w2"
            await place.join(worker)
            change = await _until_told(socket, lambda message: message.get("workers"))
            assert (change["type"], change["workers"][0]["worker_id"]) == ("change", worker)
            assert change["revision"] > first["revision"]
            assert change["workers"][0]["etag"] in (await asked.call("GET", f"/workers/{worker}")).headers["etag"]
            made = await follower.call("POST", "/blocks", {"model": "m", "version": "1", "is_beside": True})
            (block_id,) = made.json()["block_ids"]
            await _until_told(socket, lambda message: message.get("blocks"))
            assert (await follower.call("DELETE", f"/blocks/{block_id}")).status_code == 204
            gone = await _until_told(socket, lambda message: message.get("removed"))
            assert gone["removed"] == [{"kind": "blocks", "id": block_id}]


async def test_a_watch_continues_with_the_next_leader(place: Place, follower: Place) -> None:
    async with connect(f"ws://{follower.address}/v1/admin/watch?kinds=blocks") as socket:
        first = json.loads(await socket.recv())
        await place.manager.close()
        again = await _until_told(socket, lambda message: message["epoch"] > first["epoch"])
    assert again["type"] == "snapshot"
    assert [block["block_id"] for block in again["blocks"]] == [block["block_id"] for block in first["blocks"]]


async def test_a_watch_requires_permission(place: Place) -> None:
    keys = {scope: await place.key(str(scope), scope) for scope in (Scope.METRICS, Scope.INFERENCE, Scope.ADMIN)}
    address = f"ws://{place.address}/v1/admin/watch"

    def watching(scope: Scope, query: str = "") -> Any:
        return connect(address + query, additional_headers={"authorization": f"Bearer {keys[scope]}"})

    for refused, code in (
        (connect(address), 401),
        (watching(Scope.INFERENCE), 403),
        (watching(Scope.METRICS, "?kinds=keys"), 403),
        (watching(Scope.METRICS, "?kinds=secrets"), 400),
    ):
        with pytest.raises(InvalidStatus) as failure:
            await refused
        assert failure.value.response.status_code == code
    async with watching(Scope.METRICS) as socket:
        first = json.loads(await socket.recv())
        assert "keys" not in first
        await place.keys.revoke("metrics")
        with pytest.raises(ConnectionClosed) as closed:
            await _until_told(socket, lambda message: False)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
    async with watching(Scope.ADMIN, "?kinds=keys") as socket:
        first = json.loads(await socket.recv())
        assert {key["spec"]["name"]: key["state"] for key in first["keys"]}["metrics"] == "revoked"
        assert "blocks" not in first


async def test_a_manager_answers_reads_while_the_leader_hangs(follower: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # it accepts connections, like a suspended process
        address = f"127.0.0.1:{hanging.getsockname()[1]}"
        record = LeaderRecord(manager_id="first", address=address, lease=1)
        with capture_logs() as lines:
            monkeypatch.setattr(follower.manager.control.election, "leader", record)
            await until(lambda: address in [line.get("address") for line in lines])
        blocks, keys, rollouts, _ = await asyncio.gather(
            follower.get("/blocks"), follower.get("/keys"), follower.get("/rollouts"), follower.get("/workers")
        )
    assert {block["spec"]["model"] for block in blocks["items"]} == {"m", "n"}
    assert (keys["items"], rollouts["items"]) == ([], [])
