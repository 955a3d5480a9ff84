"""The request log of a running server: what each protocol leaves there, who may read it, and how commands show it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict
from typer.testing import CliRunner
from websockets.asyncio.client import connect

from benchmarks.postgres import Postgres
from penstock.cli.main import app
from penstock.core.config import RequestLogSettings
from penstock.core.principals import Scope
from penstock.endpoints.guard import Guard
from penstock.features.keys.key_table import KEY_BYTES, KeyRecord, KeyTable, compute_key_digest, format_key_text
from penstock.pb.blocks import inference_pb2
from penstock.pb.blocks.inference_pb2_grpc import BlockInferenceServiceStub
from penstock.pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.roles_bed import RunningRoles, roles_running
from tests.servers import floats, floats_json, write_identity

pytestmark = pytest.mark.asyncio(loop_scope="module")
LARGEST = 2**64 - 1  # seq_no
SECRET = b"of this cluster"
KEYS = {
    name: format_key_text(bytes([number]) * KEY_BYTES) for number, name in enumerate(("one", "two", "admin", "some"))
}
INFER = "/v2/models/identity/infer"


def record(name: str) -> KeyRecord:
    scopes = [Scope.ADMIN] if name in ("admin", "some") else [Scope.INFERENCE]
    found = {"key_id": f"id-{name}", "name": name, "digest": compute_key_digest(KEYS[name], SECRET), "scopes": scopes}
    return KeyRecord.model_validate(found | ({"models": ["identity"]} if name == "some" else {}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roles(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningRoles]:
    folder = tmp_path_factory.mktemp("roles")
    write_identity(folder / "models", "identity", "FP32")
    guard = Guard("required")
    with Postgres(folder / "postgres") as postgres:
        settings = RequestLogSettings(url=postgres.url)
        async with roles_running(folder, folder / "models", guard, request_log=settings) as running:
            guard.set_keys(KeyTable(SECRET, [record(name) for name in KEYS]))
            yield running


def client(roles: RunningRoles, key: str = "admin") -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{roles.http}", headers={"authorization": f"Bearer {KEYS[key]}"})


async def logged(roles: RunningRoles, path: str, key: str = "admin", count: int = 1) -> list[dict[str, Any]]:
    """Return the rows that a path shows, as soon as there are `count`."""
    async with client(roles, key) as http:
        found: list[dict[str, Any]] = []

        async def read() -> bool:
            found[:] = (await http.get(path)).raise_for_status().json()["items"]
            return len(found) >= count

        for _ in range(200):
            if await read():
                break
            await asyncio.sleep(0.05)
    return found


async def test_a_rest_request_is_logged(roles: RunningRoles) -> None:
    async with client(roles, "one") as http:
        headers = {"x-request-id": "rest-1"}
        body = floats_json(1, 2) | {"parameters": {"session_id": "a/b c"}}
        assert (await http.post(INFER, json=body, headers=headers)).status_code == 200
    (row,) = await logged(roles, "/logs/request/rest-1")
    expected = {"status": "ok", "protocol": "rest", "model": "identity", "version": "1", "key": "one"}
    assert expected.items() <= row.items()
    assert (row["session_id"], row["gateway"]) == ("a/b c", "gateway-0")
    assert (row["request_bytes"], row["response_bytes"], row["data_bytes"]) == (8, 8, 8)
    assert json.loads(row["data"]) == {"inputs": {"x": [1.0, 2.0]}}
    assert row["duration_ms"] > 0
    session = await logged(roles, f"/logs/session/{quote('a/b c', safe='')}")
    assert session == [row]
    assert await logged(roles, f"/logs/session_block?session_id=a%2Fb%20c&block_id={row['block_id']}") == [row]
    assert row in await logged(roles, f"/logs/block/{row['block_id']}")


async def test_grpc_streams_and_websockets_are_logged(roles: RunningRoles) -> None:
    metadata = (("authorization", f"Bearer {KEYS['one']}"),)
    async with grpc.aio.insecure_channel(roles.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(floats("identity", 1.0, request_id="grpc-1"), metadata=metadata)
        async for answer in stub.ModelStreamInfer(
            iter([floats("identity", 1.0, request_id="str-1")]), metadata=metadata
        ):
            assert not answer.error_message
    url = f"ws://{roles.http}/v2/models/identity/stream"
    async with connect(url, additional_headers=dict(metadata)) as socket:
        await socket.send(json.dumps(floats_json(1.0) | {"id": "ws-1"}))
        await socket.recv()
    found = {(await logged(roles, f"/logs/request/{name}"))[0]["protocol"] for name in ("grpc-1", "str-1", "ws-1")}
    assert found == {"grpc", "grpc-stream", "websocket"}


async def test_a_packet_is_found_by_the_queries_of_the_block_protocol(roles: RunningRoles) -> None:
    metadata = (("authorization", f"Bearer {KEYS['one']}"),)
    async with client(roles, "one") as http:
        await http.post(INFER, json=floats_json(1), headers={"x-request-id": "of-block"})
        (block_id,) = {row["block_id"] for row in await logged(roles, "/logs/request/of-block", "one")}
        packet = {"block_id": block_id, "session_id": "sess/1", "seq_no": LARGEST, "ts": 1700000000.25}
        data = {"inputs": {"x": [[1.0, 2.0]]}}
        assert (await http.post("/v1/infer", json=packet | {"data": data})).status_code == 200
    async with grpc.aio.insecure_channel(roles.grpc) as channel:
        sent = inference_pb2.BlockInferencePacket(
            block_id=block_id, session_id="sess/1", seq_no=7, data=json.dumps(data)
        )
        await BlockInferenceServiceStub(channel).infer(sent, metadata=metadata)
    rows = await logged(roles, "/logs/session/sess%2F1", "one", count=2)
    assert [row["seq_no"] for row in rows] == [7, LARGEST]
    assert [row["status"] == "ok" for row in rows] == [True, True]
    assert [json.loads(row["data"]) for row in rows] == [data, data]
    assert rows[1]["client_ts"] == "2023-11-14T22:13:20.250000Z"
    assert await logged(roles, f"/logs/session_block?session_id=sess%2F1&block_id={block_id}", "one", 2) == rows
    assert await logged(roles, f"/logs/request/{rows[0]['request_id']}", "one") == rows[:1]
    window = "time=client_ts&since=1700000000&until=2023-11-14T22:13:21Z"
    assert await logged(roles, f"/logs/block/{block_id}?{window}", "one") == rows[1:]


async def test_failed_and_refused_requests_are_logged_with_their_code(roles: RunningRoles) -> None:
    async with client(roles, "one") as http:
        await http.post("/v2/models/absent/infer", json=floats_json(1), headers={"x-request-id": "bad-1"})
        await http.post(INFER, content=b"{", headers={"x-request-id": "bad-2"})
    (unknown,) = await logged(roles, "/logs/request/bad-1?status=error")
    (unread,) = await logged(roles, "/logs/request/bad-2")
    assert (unread["status"], unread["model"]) == ("invalid_request", "identity")
    assert (unknown["status"], unknown["block_id"], unknown["model"]) == ("unknown_model", None, "absent")
    assert await logged(roles, "/logs/request/bad-1?status=ok", count=0) == []


async def test_packets_and_messages_that_endpoints_refuse_are_logged(roles: RunningRoles) -> None:
    absent = {"block_id": "blk-absent-1", "session_id": "refused", "seq_no": 1, "data": {"inputs": {}}}
    wrong = absent | {"block_id": "identity", "seq_no": 2, "data": {"unknown": 1}}
    metadata = (("authorization", f"Bearer {KEYS['one']}"),)
    async with client(roles, "one") as http, grpc.aio.insecure_channel(roles.grpc) as channel:
        stub = BlockInferenceServiceStub(channel)
        for body in (absent, wrong):
            assert (await http.post("/v1/infer", json=body)).status_code in (400, 404)
            sent = ParseDict(body | {"data": json.dumps(body["data"])}, inference_pb2.BlockInferencePacket())
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.infer(sent, metadata=metadata)
        headers = {"x-request-id": "no-json"}
        assert (await http.post("/v1/embeddings", content=b"{", headers=headers)).status_code == 400
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.infer(inference_pb2.BlockInferencePacket(), metadata=metadata)
        nobody = await http.post("/v1/infer", json=absent | {"seq_no": 3}, headers={"authorization": "Bearer none"})
        assert nobody.status_code == 401
    rows = await logged(roles, "/logs/session/refused", "one", count=4)
    found = sorted((row["seq_no"], row["protocol"], row["status"]) for row in rows)
    refused = [(1, "unknown_model"), (2, "invalid_tensor")]
    assert found == [(number, protocol, code) for number, code in refused for protocol in ("packet", "rest")]
    assert {(row["key"], row["model"]) for row in rows} == {("one", "blk-absent-1"), ("one", "identity")}
    assert [row["status"] for row in await logged(roles, "/logs/request/no-json", "one")] == ["invalid_request"]
    without = await logged(roles, "/logs?status=error&limit=100", "one", count=6)
    assert [row["session_id"] for row in without if row["protocol"] == "packet"].count(None) == 1


async def test_a_caller_sees_the_requests_of_its_own_key(roles: RunningRoles) -> None:
    for key in ("one", "two"):
        async with client(roles, key) as http:
            headers = {"x-request-id": "shared-id"}
            assert (await http.post(INFER, json=floats_json(1), headers=headers)).status_code == 200
    assert {row["key"] for row in await logged(roles, "/logs/request/shared-id", count=2)} == {"one", "two"}
    for key in ("one", "two"):
        assert [row["key"] for row in await logged(roles, "/logs/request/shared-id", key)] == [key]
    # An administrator of some models is no administrator of the log.
    assert await logged(roles, "/logs/request/shared-id", "some", count=0) == []


async def test_pages_and_times_select_rows(roles: RunningRoles) -> None:
    async with client(roles, "two") as http:
        for _ in range(5):
            await http.post(INFER, json=floats_json(1), headers={"x-request-id": "page"})
        rows = await logged(roles, "/logs/request/page", "two", count=5)
        seen, cursor = [], ""
        while cursor is not None:
            page = (await http.get("/logs/request/page", params={"limit": "2", "cursor": cursor})).json()
            seen += page["items"]
            cursor = page["next_cursor"]
        assert seen == rows
        later = await http.get("/logs/request/page", params={"since": rows[1]["ts"], "order": "oldest"})
        assert later.json()["items"] == [rows[1], rows[0]]
        packets = await http.get("/logs/request/page", params={"time": "client_ts"})
        assert packets.json()["items"] == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("since=yesterday", "since is 'yesterday': it must be a time"),
        ("until=2026-01-31T12:00:00", "until is '2026-01-31T12:00:00'"),
        ("until=99999999999999999999", "until is"),
        ("time=now", "time is 'now': it must be ts or client_ts"),
        ("order=up", "order is 'up'"),
        ("limit=1001", "limit is '1001'"),
        ("cursor=AAAA", "invalid cursor"),
        ("cursor=WzEsMiwzXQ", "invalid cursor"),
        ("cursor=Wy0xLCJhIiw5OTk5OTk5OTk5OTk5OTk5OTk5OV0", "invalid cursor"),
    ],
)
async def test_wrong_queries_are_refused(roles: RunningRoles, query: str, message: str) -> None:
    async with client(roles) as http:
        answer = await http.get(f"/logs?{query}")
    assert answer.status_code == 400
    assert message in answer.json()["error"]


async def test_a_query_without_its_ids_is_refused(roles: RunningRoles) -> None:
    async with client(roles) as http:
        answer = await http.get("/logs/session_block?session_id=a")
        assert (answer.status_code, "give both session_id and block_id" in answer.json()["error"]) == (400, True)
        assert (await http.get("/logs/session/nobody%27s")).json() == {"items": [], "next_cursor": None}


async def test_the_command_shows_the_log(roles: RunningRoles, tmp_path: Path) -> None:
    async with client(roles, "one") as http:
        await http.post(INFER, json=floats_json(1), headers={"x-request-id": "command-" + "x" * 40})
    await logged(roles, "/logs/request/command-" + "x" * 40)
    key_file = tmp_path / "key"
    key_file.write_text(KEYS["admin"])

    async def shown(*arguments: str) -> str:
        common = ["log", "--server", f"http://{roles.http}", "--key-file", str(key_file)]
        result = await asyncio.to_thread(CliRunner().invoke, app, [*common, *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    lines = (await shown("--since", "1h", "--status", "ok")).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].split() == ["time", "status", "ms", "model", "session", "request"]
    assert "command-xxx…" in lines[-1]
    details = await shown("--request", "command-" + "x" * 40)
    assert "protocol        rest\n" in details
    found = [json.loads(line) for line in (await shown("--json", "--limit", "1")).splitlines()]
    assert [row["request_id"] for row in found] == ["command-" + "x" * 40]
    assert "no logged request matches" in await shown("--session", "nobody")
