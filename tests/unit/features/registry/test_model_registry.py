"""The model registry over gRPC: uploads, versions, aliases and refusals, and that no files are left behind."""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.client.registry import RegistryClient
from penstock.core.blocks import BlockRecord, BlockRole
from penstock.core.config import RegistrySettings
from penstock.core.errors import (
    Conflict,
    Corrupted,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    PenstockError,
    RequestTooLarge,
    Unavailable,
    UnknownModel,
)
from penstock.core.principals import Principal, Scope
from penstock.endpoints.guarded_server import CurrentCall, current_call
from penstock.features.registry.manifest import ModelFacts, make_manifest
from penstock.features.registry.model_registry import ModelRegistry
from penstock.features.registry.uploads import UploadRules
from tests.registry_bed import RegistryBed, manifest_of, model_of, registry_bed, write_files


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[RegistryBed]:
    async with registry_bed(tmp_path / "data") as bed:
        yield bed


@pytest.fixture
async def client(bed: RegistryBed) -> AsyncIterator[RegistryClient]:
    async with bed.client() as client:
        yield client


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def push(client: RegistryClient, folder: Path, files: dict[str, bytes], version: str = "1", model: str = "m"):
    return await client.push(manifest_of(files, model, version), write_files(folder / secrets.token_hex(4), files))


async def read(client: RegistryClient, sha256: str, offset: int = 0) -> bytes:
    return b"".join([piece async for piece in client.read(sha256, offset)])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_a_version_is_pushed_found_and_read(bed: RegistryBed, client: RegistryClient, tmp_path: Path) -> None:
    data = secrets.token_bytes(3_000_000)
    told: list[int] = []
    files = {**model_of(data), "1/empty.txt": b"", "1/deep/one.txt": b"1"}
    manifest = manifest_of(files)
    facts = ModelFacts(tags=("mine",), batchable=True)
    made = await client.push(manifest, write_files(tmp_path / "m", files), facts, told.append)
    assert (made.model, made.version, made.digest, made.files) == ("m", "1", manifest.digest, 4)
    assert made.aliases == ("latest",)
    assert made.facts["tags"] == ["small", "mine"]
    assert made.facts["task"] == "tensor"
    assert made.facts["batchable"] is True
    assert made.facts["shards"] == 1
    assert told[-1] == manifest.size_bytes
    assert await client.find("m") == await client.find("m:1") == await client.find("m@latest") == made
    assert await read(client, sha256(data)) == data
    assert await read(client, sha256(data), 2_999_990) == data[-10:]
    assert bed.staged() == []
    assert await client.push(manifest, {}) == made  # already uploaded


async def test_equal_files_are_stored_once_and_collected_with_the_last_version(
    bed: RegistryBed, client: RegistryClient, tmp_path: Path
) -> None:
    first, second = model_of(b"same"), model_of(b"same", "2")
    await push(client, tmp_path, first)
    before = bed.stored()
    await push(client, tmp_path, second, "2")
    assert len(bed.stored() - before) == 1  # a manifest
    await client.delete("m", "2")
    assert bed.stored() == before
    await client.delete("m", "1")
    assert bed.stored() == set()
    assert await client.list() == []


async def test_a_version_never_changes(client: RegistryClient, tmp_path: Path) -> None:
    await push(client, tmp_path, model_of(b"one"))
    with pytest.raises(Conflict, match="cannot be changed"):
        await push(client, tmp_path, model_of(b"two"))


async def test_only_one_of_two_concurrent_writers_of_a_version_succeeds(bed: RegistryBed, tmp_path: Path) -> None:
    async with bed.client() as first, bed.client() as second:
        made = await asyncio.gather(
            push(first, tmp_path, model_of(b"one")), push(second, tmp_path, model_of(b"two")), return_exceptions=True
        )
        assert sorted(isinstance(each, Conflict) for each in made) == [False, True]
        (kept,) = await first.list()
    assert {sha256(b"one"), sha256(b"two")} & bed.stored() == {
        sha256(b"one" if kept.digest == manifest_of(model_of(b"one")).digest else b"two")
    }
    assert bed.staged() == []


async def test_latest_follows_the_newest_version_and_other_aliases_do_not(
    client: RegistryClient, tmp_path: Path
) -> None:
    for version in ("2", "10", "9"):
        await push(client, tmp_path, model_of(version=version), version)
    await client.set_alias("m", "stable", "2")
    assert [each.version for each in await client.list("m")] == ["10", "9", "2"]
    assert (await client.find("m")).version == "10"
    assert (await client.find("m@stable")).version == "2"
    await client.delete("m", "10")
    assert (await client.find("m@latest")).version == "9"
    with pytest.raises(Conflict, match="stable"):
        await client.delete("m", "2")
    assert (await client.find("m@stable")).aliases == ("stable",)
    await client.set_alias("m", "stable", "9")
    await client.delete("m", "2")
    await client.set_alias("m", "stable", "")
    with pytest.raises(UnknownModel):
        await client.find("m@stable")
    for alias, version in (("latest", "9"), ("7", "9"), ("a/b", "9")):
        with pytest.raises(InvalidRequest):
            await client.set_alias("m", alias, version)
    with pytest.raises(UnknownModel):
        await client.set_alias("m", "stable", "77")


async def test_a_deployed_version_is_not_deleted(bed: RegistryBed, client: RegistryClient, tmp_path: Path) -> None:
    made = await push(client, tmp_path, model_of())
    record = BlockRecord(model="m", version="1", source=f"registry:{made.digest}")
    await bed.store.put("blocks/blk-1", record.model_dump_json().encode())
    with pytest.raises(Conflict, match="blk-1"):
        await client.delete("m", "1")
    assert (await client.find("m")).blocks == ("blk-1",)
    withdrawn = record.model_copy(update={"role": BlockRole.WITHDRAWN})
    await bed.store.put("blocks/blk-1", withdrawn.model_dump_json().encode())
    await client.delete("m", "1")
    for name in ("m", "m:1"):
        with pytest.raises(UnknownModel):
            await client.find(name)
    with pytest.raises(UnknownModel):
        await client.delete("m", "1")


# --- interrupted, wrong or hostile uploads


async def test_an_interrupted_upload_resumes(bed: RegistryBed, client: RegistryClient, tmp_path: Path) -> None:
    data = secrets.token_bytes(100_000)
    files = model_of(data)
    manifest = manifest_of(files)
    begun = await bed.registry.begin(manifest, ModelFacts())

    async def cut() -> AsyncIterator[bytes]:
        yield data[:40_000]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await bed.registry.append(begun.upload_id, sha256(data), 0, cut())
    assert (await bed.registry.begin(manifest, ModelFacts())).offsets[sha256(data)] == 40_000
    with pytest.raises(Conflict, match="from byte 40000"):
        await bed.registry.append(begun.upload_id, sha256(data), 0, pieces(data))
    sources = write_files(tmp_path / "m", files)
    large = sources[sha256(data)]
    large.write_bytes(b"\0" * 40_000 + data[40_000:])  # files that exist are not read again
    made = await client.push(manifest, sources)
    assert await read(client, sha256(data)) == data
    assert made.digest == manifest.digest


async def test_the_latest_client_continues_an_upload(bed: RegistryBed) -> None:
    data = b"0123456789"
    manifest = manifest_of(model_of(data))
    begun = await bed.registry.begin(manifest, ModelFacts())
    may_go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield data[:4]
        await may_go_on.wait()
        yield data[4:]

    first = asyncio.create_task(bed.registry.append(begun.upload_id, sha256(data), 0, slow()))
    while (await bed.registry.read_progress(begun.upload_id)).offsets[sha256(data)] < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await bed.registry.append(begun.upload_id, sha256(data), 4, pieces(data[4:6])) == 6
    may_go_on.set()
    with pytest.raises(Conflict, match="another connection"):
        await first
    assert await bed.registry.append(begun.upload_id, sha256(data), 6, pieces(data[6:])) == 10


async def test_a_wrong_file_is_discarded_and_can_be_sent_again(
    bed: RegistryBed, client: RegistryClient, tmp_path: Path
) -> None:
    files = model_of(b"right")
    manifest = manifest_of(files)
    begun = await bed.registry.begin(manifest, ModelFacts())
    with pytest.raises(Corrupted):
        await bed.registry.append(begun.upload_id, sha256(b"right"), 0, pieces(b"wrong"))
    assert (await bed.registry.read_progress(begun.upload_id)).offsets[sha256(b"right")] == 0
    with pytest.raises(InvalidRequest, match="more than the 5 bytes"):
        await bed.registry.append(begun.upload_id, sha256(b"right"), 0, pieces(b"rig", b"hthth"))
    with pytest.raises(InvalidRequest, match="no file"):
        await bed.registry.append(begun.upload_id, sha256(b"other"), 0, pieces(b"other"))
    with pytest.raises(InvalidRequest, match="are incomplete"):
        await bed.registry.commit(begun.upload_id)
    await client.push(manifest, write_files(tmp_path / "m", files))


async def test_a_file_that_changes_during_the_upload_is_reported(client: RegistryClient, tmp_path: Path) -> None:
    files = model_of(b"right")
    sources = write_files(tmp_path / "m", files)
    sources[sha256(b"right")].write_bytes(b"wrong")
    with pytest.raises(Corrupted):
        await client.push(manifest_of(files), sources)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (model_of(settings="task: [\n"), "model.yaml:"),
        (model_of(settings="surprise: 1\n"), "surprise"),
        (model_of(settings="file: other.onnx\n"), "'1/other.onnx' is missing"),
        (model_of(settings="file: ../../etc/passwd\n"), "passwd"),
        (
            model_of(settings="task: upscale\nupscale: {denoise: /etc/passwd}\n"),
            "must be a file in the version's folder",
        ),
        ({**model_of(), "1/version.yaml": b"precision: 3\n"}, "version.yaml"),
        ({**model_of(), "1/w-00001-of-00002.bin": b"x"}, "00002 of 00002"),
        ({"model.yaml": b"x: " + b"y" * 2_000_000, "1/model.onnx": b""}, "over 1048576"),
    ],
)
async def test_an_unservable_version_is_refused_and_leaves_nothing(
    bed: RegistryBed, client: RegistryClient, tmp_path: Path, files: dict[str, bytes], told: str
) -> None:
    with pytest.raises(PenstockError, match=told) as caught:
        await push(client, tmp_path, files)
    assert "/tmp" not in caught.value.message
    assert await client.list() == []
    assert bed.staged() == []
    assert bed.stored() == set()


@pytest.mark.parametrize(
    "facts",
    [
        ModelFacts(task="embed"),
        ModelFacts(shards=4),
        ModelFacts(engine="python"),
    ],
)
async def test_metadata_must_match_the_files(client: RegistryClient, tmp_path: Path, facts: ModelFacts) -> None:
    files = model_of()
    with pytest.raises(InvalidRequest, match="metadata"):
        await client.push(manifest_of(files), write_files(tmp_path / "m", files), facts)


async def test_the_error_for_a_missing_file_mentions_managers_without_a_shared_store(client: RegistryClient) -> None:
    with pytest.raises(UnknownModel, match=r"registry\.objects"):
        await read(client, "0" * 64)


async def test_names_that_are_paths_reach_no_file(bed: RegistryBed, client: RegistryClient) -> None:
    (bed.folder / "secret").write_text("secret")
    for name in ("../../secret", "../secret", "a" * 63, "A" * 64, ""):
        with pytest.raises(UnknownModel):
            await read(client, name)
        with pytest.raises(InvalidRequest):
            await bed.registry.append(name, name, 0, pieces(b"x"))
    for model in ("..", "a/b", "", "x" * 200):
        with pytest.raises(PenstockError):
            await client.delete(model, "1")
        with pytest.raises(PenstockError):
            await client.find(model)


async def test_sizes_and_numbers_are_bounded(tmp_path: Path) -> None:
    settings, rules = RegistrySettings(max_model_bytes=1000), UploadRules(max_files=3, max_uploads=2)
    async with registry_bed(tmp_path, settings, rules) as bed:
        many = {**model_of(), "1/a": b"", "1/b": b""}
        with pytest.raises(RequestTooLarge, match="4 files, more than 3"):
            await bed.registry.begin(manifest_of(many), ModelFacts())
        with pytest.raises(RequestTooLarge, match="max_model_bytes"):
            await bed.registry.begin(manifest_of(model_of(b"x" * 1001)), ModelFacts())
        for number in ("1", "2"):
            await bed.registry.begin(manifest_of(model_of(version=number), version=number), ModelFacts())
        with pytest.raises(Overloaded):
            await bed.registry.begin(manifest_of(model_of(version="3"), version="3"), ModelFacts())
        await bed.registry.abort(manifest_of(model_of(version="2"), version="2").digest)
        await bed.registry.begin(manifest_of(model_of(version="3"), version="3"), ModelFacts())


async def test_an_upload_larger_than_the_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    huge = [
        {"path": "1/model.onnx", "size_bytes": 2**58, "sha256": "1" * 64},
        {"path": "model.yaml", "size_bytes": 1, "sha256": "2" * 64},
    ]
    async with registry_bed(tmp_path, RegistrySettings(max_model_bytes=2**60)) as bed:
        with pytest.raises(PenstockError, match="room for"):
            await bed.registry.begin(make_manifest("m", "1", huge), ModelFacts())
        assert bed.staged() == []


async def test_unfinished_uploads_and_unreferenced_files_are_deleted(tmp_path: Path) -> None:
    async with registry_bed(tmp_path, rules=UploadRules(expiry_s=100)) as bed:
        files = model_of(b"weights")
        begun = await bed.registry.begin(manifest_of(files), ModelFacts())
        await bed.registry.append(begun.upload_id, sha256(b"weights"), 0, pieces(b"weights"))
        uploads = bed.registry._uploads
        assert await uploads.expire(time.time() + 50) == []
        assert await bed.registry.delete_unused_files() == 0  # younger than the age limit of uploads
        (gone,) = await uploads.expire(time.time() + 200)
        assert gone.digest == begun.upload_id
        assert bed.staged() == []
        for file in (tmp_path / "objects").rglob("*"):
            os.utime(file, (1, 1))
        assert await bed.registry.delete_unused_files() == 1
        assert bed.stored() == set()


async def test_files_that_are_being_collected_count_as_missing(bed: RegistryBed, tmp_path: Path) -> None:
    records = bed.registry._records
    files = model_of(b"weights")
    manifest = manifest_of(files)
    begun = await bed.registry.begin(manifest, ModelFacts())
    for data in files.values():
        await bed.registry.append(begun.upload_id, sha256(data), 0, pieces(data))
    revision, _ = await records.read_guard()
    await records.mark_doomed([sha256(b"weights")], revision)
    with pytest.raises(PenstockError, match="being deleted"):
        await bed.registry.commit(begun.upload_id)
    await records.clear_doomed([sha256(b"weights")])
    await bed.registry.commit(begun.upload_id)
    with pytest.raises(Conflict):  # a version was added since
        await records.mark_doomed([sha256(b"weights")], revision)


async def test_a_file_in_many_small_pieces_is_read_once(bed: RegistryBed, monkeypatch: pytest.MonkeyPatch) -> None:
    data = secrets.token_bytes(1000)
    begun = await bed.registry.begin(manifest_of(model_of(data)), ModelFacts())
    fed: list[object] = []
    monkeypatch.setattr("hashlib.file_digest", lambda *each: fed.append(each))
    for start in range(0, 1000, 100):
        there = await bed.registry.append(begun.upload_id, sha256(data), start, pieces(data[start : start + 100]))
        assert there == start + 100
    assert fed == []
    assert sha256(data) in bed.stored()


async def test_an_upload_leaves_the_disk_some_room(bed: RegistryBed, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = await bed.registry.begin(manifest_of(model_of(b"0123")), ModelFacts())
    with monkeypatch.context() as context:
        context.setattr("penstock.features.registry.uploads.RESERVED_BYTES", 2**62)
        with pytest.raises(Unavailable, match="No space left"):
            await bed.registry.append(begun.upload_id, sha256(b"0123"), 0, pieces(b"0123"))
    assert await bed.registry.append(begun.upload_id, sha256(b"0123"), 0, pieces(b"0123")) == 4


async def test_managers_that_share_their_stores_share_one_registry(bed: RegistryBed, tmp_path: Path) -> None:
    other = ModelRegistry(bed.store, bed.objects, tmp_path / "elsewhere", RegistrySettings())

    async def upload(registry: ModelRegistry, data: bytes) -> str:
        files = model_of(data)
        begun = await registry.begin(manifest_of(files), ModelFacts())
        for each in files.values():
            with suppress(Conflict):  # the other one had it
                await registry.append(begun.upload_id, sha256(each), 0, pieces(each))
        return (await registry.commit(begun.upload_id)).record.digest

    made = await asyncio.gather(upload(bed.registry, b"one"), upload(other, b"two"), return_exceptions=True)
    assert sorted(isinstance(each, PenstockError) for each in made) == [False, True]
    (won,) = (each for each in made if isinstance(each, str))
    for registry in (bed.registry, other):
        assert [each.record.digest for each in await registry.list()] == [won]
        manifest = await registry.read_manifest(won)
        for file in manifest.files:
            assert [piece async for piece in registry.read(file.sha256)]
    assert [file for file in (tmp_path / "elsewhere").rglob("*") if file.is_file()] == bed.staged() == []


async def test_changes_are_reported_as_events(bed: RegistryBed, client: RegistryClient, tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    bed.registry._on_event = lambda kind, model, text: told.append((kind, model))
    await push(client, tmp_path, model_of())
    await client.set_alias("m", "stable", "1")
    await client.set_alias("m", "stable", "")
    await client.delete("m", "1")
    assert told == [("model_registered", "m"), ("model_alias", "m"), ("model_alias", "m"), ("model_deleted", "m")]


async def test_a_keys_allow_list_applies_to_the_registry(
    bed: RegistryBed, client: RegistryClient, tmp_path: Path
) -> None:
    registry = bed.registry
    for model in ("mine", "other"):
        await push(client, tmp_path, model_of(model.encode()), model=model)
    mine, others = [(await registry.find(f"{model}:1")).record for model in ("mine", "other")]
    others_file = hashlib.sha256(b"other").hexdigest()
    begun = await registry.begin(manifest_of({"model.yaml": b"task: embed\n"}, "other", "3"), ModelFacts())

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    uploader = Principal("uploader", "key-1", frozenset({Scope.UPLOAD}), models=("mine*",))
    token = current_call.set(CurrentCall(uploader, "test"))
    try:
        assert {found.model for found in await registry.list()} == {"mine"}
        assert (await registry.find("mine:1")).version == "1"
        for reference in ("other:1", "absent:1"):
            with pytest.raises(UnknownModel, match=f"^the registry has no '{reference}'$"):
                await registry.find(reference)
        for sha256, is_manifest in ((others.digest, True), (others_file, False)):
            with pytest.raises(UnknownModel, match="no file with the SHA-256"):
                [piece async for piece in registry.read(sha256, is_manifest=is_manifest)]
        assert [piece async for piece in registry.read(mine.digest, is_manifest=True)]
        manifest = manifest_of({"model.yaml": b"task: embed\n"}, "other", "2")
        for call in (
            registry.begin(manifest, ModelFacts()),
            registry.set_alias("other", "good", "1"),
            registry.delete("other", "1"),
        ):
            with pytest.raises(Forbidden, match="limited to other models"):
                await call
        for upload_id in (begun.upload_id, "0" * 64):
            for asked in (
                registry.read_progress(upload_id),
                registry.append(upload_id, others_file, 0, nothing()),
                registry.commit(upload_id),
                registry.abort(upload_id),
            ):
                with pytest.raises(NotFound, match="there is no such upload"):
                    await asked
    finally:
        current_call.reset(token)
    assert {found.model for found in await registry.list()} == {"mine", "other"}
