"""One suite for object stores: a folder and a real S3 server."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.core.config import S3Settings
from penstock.core.errors import ConfigError, Unavailable
from penstock.storage.objects.folder_objects import FolderObjects
from penstock.storage.objects.object_store import ObjectStore, open_objects
from penstock.storage.objects.s3 import S3Objects
from tests.s3 import S3Server

LARGE = 20 * 1024 * 1024 + 17  # more than one part of a multipart upload


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "buckets") as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return open_objects(f"file://{tmp_path}/objects", tmp_path, S3Settings())
    server: S3Server = request.getfixturevalue("server")
    return open_objects(server.url(f"{secrets.token_hex(4)}/deep"), tmp_path, server.settings)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(store: ObjectStore, key: str, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([piece async for piece in store.get(key, start, end)])


async def keys(store: ObjectStore, prefix: str) -> set[str]:
    return {found.key async for found in store.list(prefix)}


async def test_an_object_is_stored_completely_and_read_in_ranges(store: ObjectStore) -> None:
    await store.put("blobs/a", pieces(b"0123", b"456789"))
    assert await read(store, "blobs/a") == b"0123456789"
    assert await read(store, "blobs/a", 3) == b"3456789"
    assert await read(store, "blobs/a", 3, 5) == b"34"
    assert await read(store, "blobs/a", 8, 99) == b"89"
    assert await read(store, "blobs/a", 10) == b""
    found = await store.stat("blobs/a")
    assert found is not None
    assert (found.key, found.size_bytes) == ("blobs/a", 10)
    assert found.modified_s > 1_600_000_000


async def test_a_source_file_is_moved_into_the_store(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "large.part"
    data = secrets.token_bytes(LARGE)
    file.write_bytes(data)
    await store.put("blobs/large", file)
    assert not file.exists()
    assert await read(store, "blobs/large") == data
    assert await read(store, "blobs/large", LARGE - 9) == data[-9:]


async def test_an_empty_object_is_an_object(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    await store.put("blobs/empty", file)
    assert await read(store, "blobs/empty") == b""
    found = await store.stat("blobs/empty")
    assert found is not None
    assert found.size_bytes == 0


async def test_an_object_is_replaced_and_deleted_and_listed(store: ObjectStore) -> None:
    await store.put("blobs/a", pieces(b"one"))
    await store.put("blobs/a", pieces(b"two"))
    await store.put("blobs/b", pieces(b"three"))
    await store.put("manifests/c", pieces(b"four"))
    assert await keys(store, "blobs") == {"blobs/a", "blobs/b"}
    assert await read(store, "blobs/a") == b"two"
    await store.delete("blobs/a")
    await store.delete("blobs/a")
    assert await keys(store, "blobs") == {"blobs/b"}
    assert await store.stat("blobs/a") is None
    assert await keys(store, "nothing") == set()


async def test_a_missing_object_is_reported(store: ObjectStore) -> None:
    assert await store.stat("blobs/none") is None
    with pytest.raises(FileNotFoundError):
        await read(store, "blobs/none")


async def test_a_failed_upload_leaves_nothing(store: ObjectStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"begun"
        raise RuntimeError("cut")

    with pytest.raises(Exception, match="cut"):
        await store.put("blobs/cut", broken())
    assert await store.stat("blobs/cut") is None
    assert await keys(store, "blobs") == set()


async def test_a_wrong_key_is_reported_but_not_shown(server: S3Server) -> None:
    settings = server.settings.model_copy(update={"access_key_id": "SOMEBODYELSE"})
    store = S3Objects(server.url("x"), settings)
    with pytest.raises(ConfigError, match="refuses the key") as caught:
        await store.stat("blobs/a")
    assert "penstock-test-secret" not in caught.value.message
    assert "penstock-test-secret" not in repr(settings)
    assert "penstock-test-secret" not in settings.model_dump_json()


async def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="folder cannot be used"):
        await FolderObjects(tmp_path / "file" / "objects").put("blobs/a", pieces(b"x"))


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "s3://key:secret@bucket", "file://elsewhere/x"])
def test_an_invalid_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_objects(url, tmp_path, S3Settings())
    assert "secret" not in caught.value.message
