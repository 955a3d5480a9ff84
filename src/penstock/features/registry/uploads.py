"""Unfinished uploads, whose files are stored in a folder, so that broken connections and restarts lose nothing.

The folder of an upload has the digest of its manifest as name, and holds `manifest.json`, `facts.json`, a
`<sha256>.part` per incomplete file, and an empty `<sha256>.sent` per file that was sent completely.

A file that the registry already has need not be sent. Callers who may use only some models can leave out only files of
their own versions and files that this upload has received. They must send every other file, so that knowing a
SHA-256 neither shows whether a file exists nor gives access to its bytes.
"""

import asyncio
import errno
import hashlib
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from penstock.core.config import RegistrySettings
from penstock.core.errors import Conflict, Corrupted, InvalidRequest, NotFound, Overloaded, RequestTooLarge, Unavailable
from penstock.features.registry.manifest import DIGEST, Manifest, ModelFacts, read_document, read_manifest
from penstock.storage.objects.object_names import make_blob_key
from penstock.storage.objects.object_store import ObjectStore

log = structlog.get_logger()
STATS = 16  # objects that are looked up at once
RESERVED_BYTES = 256 * 1024 * 1024  # free disk space that an upload must leave
MAX_DIGESTS = 1024


@dataclass(slots=True)
class _Part:
    """A file that is being uploaded. The newest connection writes; data from older connections is refused."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    owner: object = None


@dataclass(frozen=True, slots=True)
class UploadRules:
    """The limits on uploads that no setting changes."""

    max_files: int = 10_000  # per version; a manifest with as many files has about 2 MB
    max_uploads: int = 64  # unfinished uploads, each of which uses disk space of the manager
    expiry_s: float = 86_400.0  # without a byte; a day, to resume the next morning


class Uploads:
    """The unfinished uploads of a manager."""

    def __init__(self, folder: Path, objects: ObjectStore, settings: RegistrySettings, rules: UploadRules) -> None:
        self._folder = folder
        self._objects = objects
        self.rules = rules
        self._max_model_bytes = settings.max_model_bytes
        self._parts: dict[tuple[str, str], _Part] = {}
        self._digests: OrderedDict[tuple[str, str], PartDigest] = OrderedDict()  # hash states of interrupted files
        self._beginning = asyncio.Lock()

    async def begin(
        self, manifest: Manifest, facts: ModelFacts, readable_digests: Set[str] | None = None
    ) -> dict[str, int]:
        """Start an upload, or continue an unfinished one; return the stored size of each file, by digest.

        `readable_digests`, here and in other methods: the files that the caller may read, by digest; None: all files.
        """
        self._check_limits(manifest)
        async with self._beginning:
            with _translate_disk_errors():
                await asyncio.to_thread(self._create_upload, manifest, facts)
        offsets = await self.read_offsets(manifest, readable_digests)
        missing = sum(size - offsets[sha256] for sha256, size in manifest.blobs.items())
        free = await asyncio.to_thread(lambda: shutil.disk_usage(self._folder).free)
        if missing and missing + RESERVED_BYTES > free:
            if not any(offsets.values()):
                await self.drop(manifest.digest)
            room = max(0, free - RESERVED_BYTES)
            raise Unavailable(f"the registry has room for {room} bytes, the upload needs {missing}: free disk space")
        return offsets

    async def read(self, upload_id: str) -> tuple[Manifest, ModelFacts]:
        try:
            manifest = await asyncio.to_thread((self._build_upload_path(upload_id) / "manifest.json").read_bytes)
            facts = await asyncio.to_thread((self._build_upload_path(upload_id) / "facts.json").read_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise make_unknown_upload_error() from None
        return read_manifest(manifest), read_document(ModelFacts, facts, "metadata")

    async def read_offsets(self, manifest: Manifest, readable_digests: Set[str] | None = None) -> dict[str, int]:
        gate = asyncio.Semaphore(STATS)

        async def look(sha256: str, size: int) -> int:
            async with gate:
                if await self._is_present(manifest.digest, sha256, size, readable_digests):
                    return size
                return await self._read_sent_size(manifest, sha256, size)

        found = await asyncio.gather(*(look(sha256, size) for sha256, size in manifest.blobs.items()))
        return dict(zip(manifest.blobs, found, strict=True))

    async def append(
        self,
        upload_id: str,
        sha256: str,
        offset: int,
        pieces: AsyncIterator[bytes],
        readable_digests: Set[str] | None = None,
    ) -> int:
        """Append to a file, and return its stored size. When the file is complete, verify and store it."""
        manifest, _ = await self.read(upload_id)
        size = manifest.blobs.get(sha256)
        if size is None:
            raise InvalidRequest(f"the upload has no file with the SHA-256 {sha256[:64]}")
        if await self._is_present(upload_id, sha256, size, readable_digests):
            if offset == size:
                return size
            raise make_wrong_offset_error(size)
        part = self._parts.setdefault((upload_id, sha256), _Part())
        owner = part.owner = object()
        try:
            async with part.lock:
                with _translate_disk_errors():
                    known = self._digests.pop((upload_id, sha256), None)
                    file = self._build_part_path(upload_id, sha256)
                    writer = await asyncio.to_thread(_PartWriter, file, offset, size, known)
            try:
                async for piece in pieces:
                    async with part.lock:
                        if part.owner is not owner:
                            raise Conflict("another connection continues this upload", reason="offset")
                        with _translate_disk_errors():
                            await asyncio.to_thread(writer.write, piece)
            finally:
                writer.close()
                if part.owner is owner and writer.offset < size:
                    self._keep_digest((upload_id, sha256), writer)
            if writer.offset == size:
                async with part.lock:
                    await self._store_file(upload_id, sha256, writer.compute_digest())
            return writer.offset
        finally:
            if part.owner is owner:
                self._parts.pop((upload_id, sha256), None)

    async def has(self, upload_id: str) -> bool:
        return await asyncio.to_thread(self._build_upload_path(upload_id).is_dir)

    async def drop(self, upload_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._build_upload_path(upload_id), ignore_errors=True)

    async def expire(self, now: float) -> list[Manifest]:
        """Drop uploads that received no data for `expiry_s`; return their manifests."""
        expired: list[Manifest] = []
        for path in await asyncio.to_thread(lambda: list(self._list_upload_paths())):
            if now - await asyncio.to_thread(_read_last_write, path) < self.rules.expiry_s:
                continue
            with suppress(InvalidRequest):
                expired.append((await self.read(path.name))[0])
            log.info("upload_expired", upload=path.name)
            await self.drop(path.name)
        return expired

    def _keep_digest(self, key: tuple[str, str], writer: "_PartWriter") -> None:
        """Keep the hash state of an interrupted file, so that the upload continues without reading the file again."""
        self._digests[key] = PartDigest(writer.sha256, writer.offset)
        if len(self._digests) > MAX_DIGESTS:
            self._digests.popitem(last=False)

    def _check_limits(self, manifest: Manifest) -> None:
        if len(manifest.files) > self.rules.max_files:
            raise RequestTooLarge(f"the version has {len(manifest.files)} files, more than {self.rules.max_files}")
        if manifest.size_bytes > self._max_model_bytes:
            raise RequestTooLarge(
                f"{manifest.size_bytes} bytes are more than registry.max_model_bytes ({self._max_model_bytes})"
            )

    def _create_upload(self, manifest: Manifest, facts: ModelFacts) -> None:
        path = self._build_upload_path(manifest.digest)
        if (path / "manifest.json").is_file():
            (path / "facts.json").write_text(facts.model_dump_json())
            return
        if sum(1 for _ in self._list_upload_paths()) >= self.rules.max_uploads:
            raise Overloaded(f"{self.rules.max_uploads} uploads are unfinished; finish or abort one, or try later")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / "facts.json").write_text(facts.model_dump_json())
        draft = path / "manifest.tmp"
        draft.write_bytes(manifest.encoded)
        os.replace(draft, path / "manifest.json")

    async def _is_present(self, upload_id: str, sha256: str, size: int, readable_digests: Set[str] | None) -> bool:
        """Return whether the registry has the file, so that the caller need not send the file."""
        found = await self._objects.stat(make_blob_key(sha256))
        if found is None or found.size_bytes != size:
            return False
        return (
            readable_digests is None
            or sha256 in readable_digests
            or await asyncio.to_thread(self._build_sent_path(upload_id, sha256).is_file)
        )

    async def _read_sent_size(self, manifest: Manifest, sha256: str, size: int) -> int:
        file = self._build_part_path(manifest.digest, sha256)
        if size == 0:
            await asyncio.to_thread(file.touch)
        there = await asyncio.to_thread(_read_file_size, file)
        if there < size:
            return max(0, there)
        if there > size:
            await asyncio.to_thread(file.unlink)
            return 0
        # The file is complete: it is empty, or the manager restarted before the file was stored.
        try:
            await self._store_file(manifest.digest, sha256, await asyncio.to_thread(_hash_file, file))
        except Corrupted:
            return 0
        return size

    async def _store_file(self, upload_id: str, sha256: str, found: str) -> None:
        file = self._build_part_path(upload_id, sha256)
        if found != sha256:
            await asyncio.to_thread(file.unlink, missing_ok=True)
            raise Corrupted(f"the data has the SHA-256 {found}, not {sha256}: it was deleted, send the file again")
        await asyncio.to_thread(self._build_sent_path(upload_id, sha256).touch)
        await self._objects.put(make_blob_key(sha256), file)

    def _list_upload_paths(self) -> Iterator[Path]:
        if self._folder.is_dir():
            yield from (child for child in self._folder.iterdir() if child.is_dir())

    def _build_upload_path(self, upload_id: str) -> Path:
        if not re.fullmatch(DIGEST, upload_id):
            raise NotFound("an upload's id must be the SHA-256 of its manifest", reason="unknown_upload")
        return self._folder / upload_id

    def _build_part_path(self, upload_id: str, sha256: str) -> Path:
        return self._build_upload_path(upload_id) / f"{sha256}.part"

    def _build_sent_path(self, upload_id: str, sha256: str) -> Path:
        return self._build_upload_path(upload_id) / f"{sha256}.sent"


class PartDigest(NamedTuple):
    """The hash state of an incomplete file."""

    sha256: Any  # hash object of the first `offset` bytes
    offset: int


class _PartWriter:
    """Writes an incomplete file. Its methods block, and must be called in a thread."""

    def __init__(self, file: Path, offset: int, size: int, known_digest: PartDigest | None) -> None:
        there = max(0, _read_file_size(file))
        if there != offset:
            raise make_wrong_offset_error(there)
        self.offset = offset
        self._size = size
        if known_digest is not None and known_digest.offset == offset:
            self.sha256 = known_digest.sha256
        elif offset:
            with file.open("rb") as opened:
                self.sha256 = hashlib.file_digest(opened, "sha256")
        else:
            self.sha256 = hashlib.sha256()
        self._file = file
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, piece: bytes) -> None:
        if self.offset + len(piece) > self._size:
            self._file.unlink(missing_ok=True)
            raise InvalidRequest(f"the file has more than the {self._size} bytes of its manifest entry")
        disk = os.fstatvfs(self._fd)
        if disk.f_bavail * disk.f_frsize < RESERVED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the manager needs space for other data
        left = memoryview(piece)
        while left:
            written = os.write(self._fd, left)
            self.sha256.update(left[:written])
            self.offset += written
            left = left[written:]

    def compute_digest(self) -> str:
        return str(self.sha256.hexdigest())

    def close(self) -> None:
        os.close(self._fd)


def make_unknown_upload_error() -> NotFound:
    text = "there is no such upload: the upload was finished or has expired; start the upload again"
    return NotFound(text, reason="unknown_upload")


def make_wrong_offset_error(offset: int) -> Conflict:
    text = f"the upload must continue at the stored size: send the file from byte {offset} on"
    return Conflict(text, reason="offset", offset=str(offset))


@contextmanager
def _translate_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"the registry's disk cannot be written: {reason}; the data before that is stored") from error


def _read_file_size(file: Path) -> int:
    """Return the size of a file, or -1 if it does not exist."""
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return -1


def _read_last_write(path: Path) -> float:
    try:
        return max((child.lstat().st_mtime for child in path.iterdir()), default=path.lstat().st_mtime)
    except FileNotFoundError:
        return time.time()


def _hash_file(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
