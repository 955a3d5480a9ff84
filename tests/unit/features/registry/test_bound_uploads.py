"""Uploads by a key that is limited to some models: what it can learn of the files of others, over gRPC and REST."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.app.registry_endpoint import HttpServices, open_http_endpoint
from penstock.client.registry import RegistryClient
from penstock.core.config import load_config
from penstock.core.errors import UnknownModel
from penstock.core.principals import Principal, Scope
from penstock.endpoints.guard import Guard
from penstock.features.registry.manifest import Manifest
from penstock.pb.v1 import registry_pb2 as pb
from penstock.pb.v1 import registry_pb2_grpc
from penstock.wire.channels import Channels
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader_connection import FixedLeader, LeaderClient
from tests.registry_bed import RegistryBed, manifest_of, model_of, registry_bed, write_files

WHOLE, BOUND = "psk_whole", "psk_bound"
PRINCIPALS = {
    WHOLE: Principal("whole", "key-1", frozenset({Scope.ADMIN})),
    BOUND: Principal("bound", "key-2", frozenset({Scope.UPLOAD}), models=("mine*",)),
}
THERE, ABSENT = b"secret weights", b"unique weights"  # of another's version; of no version
TUS = {"tus-resumable": "1.0.0", "content-type": "application/offset+octet-stream"}


class FixedKeys:
    needs_key = True

    def find(self, text: str) -> Principal | None:
        return PRINCIPALS.get(text)


class Bound:
    """The registry as the bound key reaches it."""

    def __init__(self, bed: RegistryBed, rest: httpx.AsyncClient) -> None:
        self.bed, self.rest = bed, rest

    def client(self, key: str = BOUND) -> RegistryClient:
        return RegistryClient(self.bed.address, give_up_s=1.0, channels=Channels(key))

    async def over_grpc(self, manifest: Manifest, sha256: str, data: bytes, offset: int) -> list[Any]:
        """Return the answers of all RPCs that tell about a file; `data` is sent from `offset` on."""

        async def chunks() -> AsyncIterator[pb.UploadChunk]:
            yield pb.UploadChunk(start=pb.UploadStart(upload_id=manifest.digest, sha256=sha256, offset=offset))
            yield pb.UploadChunk(data=data)

        async with Channels(BOUND).open(self.bed.address) as channel:
            stub: Any = registry_pb2_grpc.ModelRegistryStub(channel)
            begun = await stub.Begin(pb.BeginUpload(manifest=manifest.encoded))
            appended = await stub.Upload(chunks())
            committed = await stub.Commit(pb.CommitUpload(upload_id=manifest.digest))
            read = [chunk async for chunk in stub.Download(pb.DownloadRequest(sha256=sha256))]
            aborted = await stub.Abort(pb.AbortUpload(upload_id=manifest.digest))
        return [str(each) for each in (begun, appended, committed, read, aborted)]

    async def over_rest(self, manifest: Manifest, sha256: str, data: bytes, offset: int) -> list[Any]:
        """Return the answers of all routes that tell about a file; `data` is sent from `offset` on."""
        upload = f"/v1/registry/uploads/{manifest.digest}"
        sent = {**TUS, "upload-offset": str(offset)}
        files = [file.model_dump() for file in manifest.files]
        answers = [
            await self.rest.post(f"/v1/registry/models/{manifest.model}/versions/1", json={"files": files}),
            await self.rest.get(upload),
            await self.rest.head(f"{upload}/files/{sha256}", headers=TUS),
            await self.rest.patch(f"{upload}/files/{sha256}", content=data, headers=sent),
            await self.rest.head(f"{upload}/files/{sha256}", headers=TUS),
            await self.rest.post(f"{upload}/commit"),
            await self.rest.get(f"/v1/registry/models/{manifest.model}/versions/1/files/1/model.onnx"),
            await self.rest.delete(upload),
        ]
        names = ("upload-offset", "upload-length", "content-length")
        return [(each.status_code, each.text, *(each.headers.get(name) for name in names)) for each in answers]


@pytest.fixture
async def bound(tmp_path: Path) -> AsyncIterator[Bound]:
    guard = Guard("required")
    guard.set_keys(FixedKeys())
    async with registry_bed(tmp_path / "data", guard=guard) as bed, AsyncExitStack() as stack:
        leader = LeaderClient(FixedLeader(bed.address))
        stack.push_async_callback(leader.close)
        services = HttpServices(bed.registry, guard, leader, leader)
        config = load_config(registry={"http_port": 0})
        address = await open_http_endpoint(config, services, "127.0.0.1", Certificates(), stack)
        url, headers = f"http://127.0.0.1:{address.port}", {"x-api-key": BOUND}
        rest = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=headers, timeout=20))
        found = Bound(bed, rest)
        async with found.client(WHOLE) as client:
            files = model_of(THERE)
            await client.push(manifest_of(files, "other"), write_files(tmp_path / "other", files))
        yield found


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("way", ["grpc", "rest"])
@pytest.mark.parametrize(("sent", "offset"), [(b"", 0), (b"", 14), (b"wrong", 0), (b"14 wrong bytes", 0)])
async def test_answers_do_not_show_whether_a_file_of_another_model_exists(
    bound: Bound, way: str, sent: bytes, offset: int
) -> None:
    assert len(THERE) == len(ABSENT) == 14
    answers = []
    for data in (THERE, ABSENT):
        manifest, sha256 = manifest_of(model_of(data), "mine"), sha256_of(data)
        ask = bound.over_grpc if way == "grpc" else bound.over_rest
        answer = json.dumps(await ask(manifest, sha256, sent, offset))
        answers.append(answer.replace(sha256, "SHA-256").replace(manifest.digest, "UPLOAD"))
    assert answers[0] == answers[1]
    assert sha256_of(THERE) in bound.bed.stored()


async def test_a_limited_key_must_send_files_of_other_models_but_not_of_its_own(bound: Bound, tmp_path: Path) -> None:
    files = model_of(THERE)
    paths = write_files(tmp_path / "mine", files)
    async with bound.client() as client:
        with pytest.raises(UnknownModel):
            [piece async for piece in client.read(sha256_of(THERE))]
        sent: list[int] = []
        await client.push(manifest_of(files, "mine-1"), paths, on_progress=sent.append)
        assert sent[-1] == sum(map(len, files.values()))
        assert b"".join([piece async for piece in client.read(sha256_of(THERE))]) == THERE
        await client.push(manifest_of(files, "mine-2"), {})  # its own version has the files
        with pytest.raises(UnknownModel):
            await client.find("other:1")
    assert bound.bed.staged() == []


async def test_a_file_of_a_wrong_size_counts_as_missing(bound: Bound) -> None:
    manifest = manifest_of(model_of(THERE), "mine")
    files = [file.model_copy(update={"size_bytes": 1}) if "onnx" in file.path else file for file in manifest.files]
    wrong = Manifest(model="mine", version="1", files=tuple(files))
    async with Channels(WHOLE).open(bound.bed.address) as channel:
        stub: Any = registry_pb2_grpc.ModelRegistryStub(channel)
        state = await stub.Begin(pb.BeginUpload(manifest=wrong.encoded))
        assert {file.sha256: file.offset for file in state.files}[sha256_of(THERE)] == 0
        answer = await stub.Commit(pb.CommitUpload(upload_id=wrong.digest))
        assert "incomplete" in answer.failure.message
