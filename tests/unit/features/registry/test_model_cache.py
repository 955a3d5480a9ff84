"""The workers' cache of fetched models: verified, bounded, shared between processes, and repaired."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Corrupted, Unavailable, UnknownModel
from penstock.features.registry.manifest import Manifest
from penstock.features.registry.model_cache import ModelCache
from tests.registry_bed import manifest_of, model_of


class Files:
    """A registry's files in memory: it counts reads, and can cut or damage them."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.reads: list[tuple[str, int]] = []
        self.cuts: dict[str, int] = {}  # bytes after which a read fails, once
        self.is_slow = False

    def add(self, files: dict[str, bytes], model: str = "m", version: str = "1") -> Manifest:
        manifest = manifest_of(files, model, version)
        self.blobs[manifest.digest] = manifest.encoded
        self.blobs |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        return manifest

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        self.reads.append((sha256, offset))
        if sha256 not in self.blobs:
            raise UnknownModel("gone")
        data = self.blobs[sha256]
        if self.is_slow:
            await asyncio.sleep(0.05)
        if (end := self.cuts.pop(sha256, None)) is not None:
            yield data[offset:end]
            raise Unavailable("cut")
        for start in range(offset, len(data), 4):
            yield data[start : start + 4]

    def count(self, data: bytes) -> int:
        return sum(1 for sha256, _ in self.reads if sha256 == hashlib.sha256(data).hexdigest())


@pytest.fixture
def files() -> Files:
    return Files()


def cache_of(tmp_path: Path, files: Files, max_bytes: int = 10_000) -> ModelCache:
    return ModelCache(tmp_path / "cache", max_bytes, files)


def entries(tmp_path: Path) -> set[str]:
    return {child.name for child in (tmp_path / "cache").iterdir() if child.is_dir()}


async def test_a_version_is_fetched_once_and_stored_as_in_a_repository(tmp_path: Path, files: Files) -> None:
    manifest = files.add({**model_of(b"weights"), "1/empty": b"", "1/deep/x": b"x"})
    for _ in range(2):
        opened = await cache_of(tmp_path, files).open(manifest.digest)
        assert opened.folder.name == "m"
        assert (opened.folder / "1" / "model.onnx").read_bytes() == b"weights"
        assert (opened.folder / "1" / "empty").read_bytes() == b""
        assert (opened.folder / "1" / "deep" / "x").read_bytes() == b"x"
        opened.close()
    assert files.count(b"weights") == 1
    assert entries(tmp_path) == {manifest.digest}


async def test_concurrent_readers_fetch_a_version_once(tmp_path: Path, files: Files) -> None:
    manifest = files.add(model_of(b"weights"))
    files.is_slow = True
    opened = await asyncio.gather(*(cache_of(tmp_path, files).open(manifest.digest) for _ in range(4)))
    assert files.count(b"weights") == 1
    for each in opened:
        each.close()


@pytest.mark.parametrize("damage", [b"wEights", b"weig", b""])
async def test_only_a_damaged_file_is_fetched_again(tmp_path: Path, files: Files, damage: bytes) -> None:
    manifest = files.add({**model_of(b"weights"), "1/other": b"other"})
    cache = cache_of(tmp_path, files)
    in_use = await cache.open(manifest.digest)
    (in_use.folder / "1" / "model.onnx").write_bytes(damage)
    opened = await cache.open(manifest.digest)
    assert (opened.folder / "1" / "model.onnx").read_bytes() == b"weights"
    assert files.count(b"weights") == 2
    assert files.count(b"other") == 1
    assert entries(tmp_path) == {manifest.digest}


async def test_a_link_instead_of_a_file_is_not_followed(tmp_path: Path, files: Files) -> None:
    manifest = files.add(model_of(b"weights"))
    cache = cache_of(tmp_path, files)
    opened = await cache.open(manifest.digest)
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (opened.folder / "1" / "model.onnx").unlink()
    (opened.folder / "1" / "model.onnx").symlink_to(tmp_path / "elsewhere")
    opened = await cache.open(manifest.digest)
    assert not (opened.folder / "1" / "model.onnx").is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"weights"


async def test_an_interrupted_fetch_resumes(tmp_path: Path, files: Files) -> None:
    data = b"0123456789"
    manifest = files.add(model_of(data))
    files.cuts[hashlib.sha256(data).hexdigest()] = 4
    cache = cache_of(tmp_path, files)
    with pytest.raises(Unavailable):
        await cache.open(manifest.digest)
    assert entries(tmp_path) == {f".fetch-{manifest.digest}"}
    opened = await cache.open(manifest.digest)
    assert (opened.folder / "1" / "model.onnx").read_bytes() == data
    assert files.reads.count((hashlib.sha256(data).hexdigest(), 4)) == 1


async def test_a_version_that_always_arrives_damaged_is_never_used(tmp_path: Path, files: Files) -> None:
    manifest = files.add(model_of(b"weights"))
    files.blobs[hashlib.sha256(b"weights").hexdigest()] = b"wEights"
    with pytest.raises(Corrupted, match=r"1/model\.onnx"):
        await cache_of(tmp_path, files).open(manifest.digest)
    files.blobs[hashlib.sha256(b"weights").hexdigest()] = b"weights and more"
    with pytest.raises(Corrupted):
        await cache_of(tmp_path, files).open(manifest.digest)
    files.blobs[manifest.digest] = b"{}"
    with pytest.raises(Corrupted, match="manifest"):
        await cache_of(tmp_path, files).open(manifest.digest)
    assert manifest.digest not in entries(tmp_path)


async def test_the_least_recently_used_version_is_evicted_and_versions_in_use_stay(
    tmp_path: Path, files: Files
) -> None:
    versions = [files.add(model_of(bytes([number]) * 100, str(number)), version=str(number)) for number in range(1, 5)]
    cache = cache_of(tmp_path, files, max_bytes=3 * versions[0].size_bytes)
    opened = []
    for number, manifest in enumerate(versions[:3]):
        opened.append(await cache.open(manifest.digest))
        os.utime(tmp_path / "cache" / f"{manifest.digest}.lock", (number, number))
    opened[1].close()
    opened[2].close()
    last = await cache.open(versions[3].digest)  # the first is older, but in use
    assert entries(tmp_path) == {versions[0].digest, versions[2].digest, versions[3].digest}
    again = await cache.open(versions[2].digest)
    with pytest.raises(Unavailable, match="cache_bytes"):
        await cache.open(versions[1].digest)
    for each in (opened[0], last, again):
        each.close()
    (await cache.open(versions[1].digest)).close()


async def test_a_version_larger_than_the_cache_is_refused(tmp_path: Path, files: Files) -> None:
    manifest = files.add(model_of(b"x" * 200))
    with pytest.raises(ConfigError, match="cache_bytes"):
        await cache_of(tmp_path, files, max_bytes=100).open(manifest.digest)


async def test_an_unusable_folder_is_reported(tmp_path: Path, files: Files) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(Unavailable, match="cannot be used"):
        await cache_of(tmp_path, files).open(files.add(model_of()).digest)
