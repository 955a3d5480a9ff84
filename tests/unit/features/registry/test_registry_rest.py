"""The registry over REST: uploads by tus, ranges, aliases, and what is refused."""

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.waiting import until_seen
from penstock.app.registry_endpoint import HttpServices, open_http_endpoint
from penstock.core.config import load_config
from penstock.endpoints.guard import create_open_guard
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from tests.registry_bed import RegistryBed, model_of, registry_bed

ROOT = "/v1/registry"
TUS = {"Tus-Resumable": "1.0.0", "Content-Type": "application/offset+octet-stream"}


class Endpoint:
    def __init__(self, bed: RegistryBed, port: int) -> None:
        self.bed = bed
        self.port = port

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[HTTPResponse, Any]:
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await asyncio.to_thread(self._call, method, path, data, named)

    def _call(self, method: str, path: str, data: Any, headers: dict[str, str]) -> tuple[HTTPResponse, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path if path.startswith("/v1") else ROOT + path, data, headers)
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get("content-type") == "application/json" and content
            return response, json.loads(content) if is_json else content
        finally:
            connection.close()

    async def push(self, files: dict[str, bytes], version: str = "1", model: str = "m", metadata: Any = None) -> Any:
        body = {"files": listed(files)} | ({"metadata": metadata} if metadata else {})
        response, begun = await self.call("POST", f"/models/{model}/versions/{version}", body)
        assert response.status == 201, begun
        for data in files.values():
            path = f"/uploads/{begun['upload']}/files/{sha256(data)}"
            response, told = await self.call("PATCH", path, data, **TUS, Upload_Offset="0")
            assert response.status in (204, 409), told  # an empty file is stored
        return await self.call("POST", f"/uploads/{begun['upload']}/commit")


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    async with registry_bed(tmp_path / "data") as bed, AsyncExitStack() as stack:
        config = load_config(registry={"http_port": 0}, limits={"header_timeout_s": 0.5, "body_timeout_s": 0.5})
        leader = LeaderClient(FixedLeader(bed.address))
        stack.push_async_callback(leader.close)
        behind = HttpServices(bed.registry, create_open_guard(), leader, leader)
        address = await open_http_endpoint(config, behind, "127.0.0.1", Certificates(), stack)
        yield Endpoint(bed, address.port or 0)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listed(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"path": path, "size_bytes": len(data), "sha256": sha256(data)} for path, data in files.items()]


async def test_a_version_is_uploaded_found_read_in_ranges_and_deleted(endpoint: Endpoint) -> None:
    data = secrets.token_bytes(300_000)
    files = {**model_of(data), "1/deep/x y.txt": b"x", "1/empty": b""}
    response, made = await endpoint.push(files, metadata={"batchable": True, "tags": ["mine"]})
    assert response.status == 201
    assert (made["model"], made["version"], made["file_count"]) == ("m", "1", 4)
    assert made["metadata"]["batchable"] is True
    assert made["metadata"]["tags"] == ["small", "mine"]
    _, all_models = await endpoint.call("GET", "/models")
    assert all_models == {"models": [made]}
    _, found = await endpoint.call("GET", "/models/m/versions/latest")
    assert {file["path"] for file in found["files"]} == set(files)
    path = "/models/m/versions/1/files/1/model.onnx"
    response, content = await endpoint.call("GET", path)
    assert (response.status, content) == (200, data)
    assert response.headers["etag"] == f'"{sha256(data)}"'
    response, content = await endpoint.call("GET", path, Range="bytes=299990-")
    assert (response.status, content) == (206, data[-10:])
    assert response.headers["content-range"] == "bytes 299990-299999/300000"
    _, content = await endpoint.call("GET", path, Range="bytes=10-19")
    assert content == data[10:20]
    _, content = await endpoint.call("GET", path, Range="bytes=-5")
    assert content == data[-5:]
    response, _ = await endpoint.call("GET", path, Range="bytes=300000-")
    assert response.status == 416
    _, content = await endpoint.call("GET", "/models/m/versions/1/files/1/deep/x%20y.txt")
    assert content == b"x"
    response, _ = await endpoint.call("DELETE", "/models/m/versions/1")
    assert response.status == 204
    assert endpoint.bed.stored() == set()


async def test_an_upload_resumes_at_its_offset(endpoint: Endpoint) -> None:
    data = secrets.token_bytes(100_000)
    files = model_of(data)
    _, begun = await endpoint.call("POST", "/models/m/versions/1", {"files": listed(files)})
    path = f"/uploads/{begun['upload']}/files/{sha256(data)}"
    response, _ = await endpoint.call("PATCH", path, data[:30_000], **TUS, Upload_Offset="0")
    assert response.headers["upload-offset"] == "30000"
    response, _ = await endpoint.call("HEAD", path, **TUS)
    assert (response.headers["upload-offset"], response.headers["upload-length"]) == ("30000", "100000")
    response, told = await endpoint.call("PATCH", path, data, **TUS, Upload_Offset="0")
    assert response.status == 409
    assert told["error"]["code"] == "conflict"
    assert response.headers["upload-offset"] == "30000"
    for method in ("HEAD", "PATCH"):
        other = {**TUS, "Tus-Resumable": "0.2.2", "Upload-Offset": "30000"}
        response, _ = await endpoint.call(method, path, b"", **other)
        assert (response.status, response.headers["tus-version"]) == (412, "1.0.0")
    await asyncio.to_thread(cut, endpoint.port, ROOT + path, data[30_000:], 20_000)
    response, told = await endpoint.call("POST", f"/uploads/{begun['upload']}/commit")
    assert response.status == 400
    while True:  # data in flight may have arrived or not
        response, _ = await endpoint.call("HEAD", path, **TUS)
        there = int(response.headers["upload-offset"])
        assert 30_000 <= there <= 50_000
        response, _ = await endpoint.call("PATCH", path, data[there:], **TUS, Upload_Offset=str(there))
        if response.status == 204:
            break
        assert response.status == 409
    settings = files["model.yaml"]
    await endpoint.call(
        "PATCH", f"/uploads/{begun['upload']}/files/{sha256(settings)}", settings, **TUS, Upload_Offset="0"
    )
    _, state = await endpoint.call("GET", f"/uploads/{begun['upload']}")
    assert all(file["offset"] == file["size_bytes"] for file in state["files"])
    response, _ = await endpoint.call("POST", f"/uploads/{begun['upload']}/commit")
    assert response.status == 201
    response, again = await endpoint.call("POST", "/models/m/versions/1", {"files": listed(files)})
    assert response.status == 200
    assert again["is_committed"] is True


async def test_a_slow_upload_is_refused_and_keeps_its_received_bytes(endpoint: Endpoint) -> None:
    data = secrets.token_bytes(50_000)
    _, begun = await endpoint.call("POST", "/models/m/versions/1", {"files": listed(model_of(data))})
    path = f"/uploads/{begun['upload']}/files/{sha256(data)}"
    lines = [f"PATCH {ROOT}{path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", "Upload-Offset: 0"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in TUS.items())]).encode()
    for sent in (head, head + b"\r\n\r\n" + data[:30_000]):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_slow"

    def offsets() -> set[int]:
        _, state = endpoint._call("GET", f"{ROOT}/uploads/{begun['upload']}", None, {})
        return {file["offset"] for file in state["files"] if file["sha256"] == sha256(data)}

    await until_seen(lambda: offsets() == {30_000}, "what came is written, if after the answer")


def cut(port: int, path: str, data: bytes, sent: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("PATCH", path)
    for name, value in {**TUS, "Upload-Offset": "30000", "Content-Length": str(len(data))}.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(data[:sent])
    connection.close()


async def test_aliases_are_set_listed_and_removed(endpoint: Endpoint) -> None:
    await endpoint.push(model_of())
    response, _ = await endpoint.call("PUT", "/models/m/aliases/stable", {"version": "1"})
    assert response.status == 204
    _, found = await endpoint.call("GET", "/models/m/versions/stable")
    assert found["aliases"] == ["latest", "stable"]
    response, told = await endpoint.call("DELETE", "/models/m/versions/1")
    assert response.status == 409
    assert "stable" in told["error"]["message"]
    response, _ = await endpoint.call("DELETE", "/models/m/aliases/stable")
    assert response.status == 204
    response, _ = await endpoint.call("GET", "/models/m/versions/stable")
    assert response.status == 404


async def test_invalid_requests_are_refused(endpoint: Endpoint) -> None:
    wrong = [
        ("POST", "/models/m/versions/1", b"{", 400),
        ("POST", "/models/m/versions/1", [], 400),
        ("POST", "/models/m/versions/1", {"files": []}, 400),
        ("POST", "/models/m/versions/1", {"files": [3]}, 400),
        ("POST", "/models/m/versions/x", {"files": listed(model_of())}, 400),
        ("POST", "/models/m/versions/1", {"files": listed({**model_of(), "1/../../x": b""})}, 400),
        ("POST", "/models/m/versions/1", {"files": listed(model_of()), "metadata": {"shards": "many"}}, 400),
        ("POST", "/models/m/versions/1", {"files": listed(model_of()), "more": 1}, 400),
        ("GET", "/models/none", None, 404),
        ("GET", "/models/none/versions/1", None, 404),
        ("GET", "/uploads/none", None, 404),
        ("GET", f"/uploads/{sha256(b'none')}", None, 404),
        ("PUT", "/models/m/aliases/stable", {}, 400),
        ("GET", "/nowhere", None, 404),
        ("PUT", "/models", None, 405),
    ]
    for method, path, body, status in wrong:
        response, told = await endpoint.call(method, path, body)
        assert response.status == status, (path, told)
        assert told["error"]["message"]
    assert endpoint.bed.staged() == []


async def test_a_wrong_digest_is_refused(endpoint: Endpoint) -> None:
    _, begun = await endpoint.call("POST", "/models/m/versions/1", {"files": listed(model_of(b"right"))})
    path = f"/uploads/{begun['upload']}/files/{sha256(b'right')}"
    response, told = await endpoint.call("PATCH", path, b"wrong", **TUS, Upload_Offset="0")
    assert (response.status, told["error"]["code"]) == (422, "corrupted")
    response, _ = await endpoint.call("DELETE", f"/uploads/{begun['upload']}")
    assert response.status == 204
    assert endpoint.bed.staged() == []


async def test_pages_of_other_sites_may_not_upload(endpoint: Endpoint) -> None:
    body = {"files": listed(model_of())}
    response, _ = await endpoint.call("POST", "/models/m/versions/1", body, Origin="http://evil.example")
    assert response.status == 403
    response, _ = await endpoint.call("GET", "/models", Host="evil.example")
    assert response.status == 421
