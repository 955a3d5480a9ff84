"""Uploads on their way: files that are not whole wait in a folder, over cut connections and restarts.

A folder an upload, called by its manifest's digest: `manifest.json`, `facts.json` and a `<sha256>.part` a file.
"""

import asyncio
import errno
import hashlib
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from penstock.core.config import RegistrySettings
from penstock.core.errors import Conflict, Corrupted, InvalidRequest, NotFound, Overloaded, RequestTooLarge, Unavailable
from penstock.core.manifest import DIGEST, Manifest, ModelFacts, read_document, read_manifest
from penstock.storage.objects.base import ObjectStore
from penstock.storage.objects.keys import blob_key

log = structlog.get_logger()
STATS = 16  # objects that are looked for at once
SMALL_BYTES = 256 * 1024 * 1024  # an upload leaves the disk so much room
MAX_DIGESTS = 1024


@dataclass(slots=True)
class _Part:
    """A file that somebody sends: who came last writes, and what an older connection still brings is refused."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    owner: object = None


class Uploads:
    def __init__(self, folder: Path, objects: ObjectStore, settings: RegistrySettings) -> None:
        self._folder = folder
        self._objects = objects
        self._settings = settings
        self._parts: dict[tuple[str, str], _Part] = {}
        self._digests: OrderedDict[tuple[str, str], PartDigest] = OrderedDict()  # of what was cut
        self._beginning = asyncio.Lock()

    async def begin(self, manifest: Manifest, facts: ModelFacts) -> dict[str, int]:
        """How far each file is, by digest."""
        self._check(manifest)
        async with self._beginning:
            with _telling():
                await asyncio.to_thread(self._make, manifest, facts)
        offsets = await self.offsets(manifest)
        missing = sum(size - offsets[sha256] for sha256, size in manifest.blobs.items())
        free = await asyncio.to_thread(lambda: shutil.disk_usage(self._folder).free)
        if missing and missing + SMALL_BYTES > free:
            if not any(offsets.values()):
                await self.drop(manifest.digest)
            room = max(0, free - SMALL_BYTES)
            raise Unavailable(f"the registry has room for {room} bytes, and {missing} would come: free some")
        return offsets

    async def read(self, upload_id: str) -> tuple[Manifest, ModelFacts]:
        try:
            manifest = await asyncio.to_thread((self._place(upload_id) / "manifest.json").read_bytes)
            facts = await asyncio.to_thread((self._place(upload_id) / "facts.json").read_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(
                "there is no such upload: it was finished or has expired; begin it again", reason="unknown_upload"
            ) from None
        return read_manifest(manifest), read_document(ModelFacts, facts, "metadata")

    async def offsets(self, manifest: Manifest) -> dict[str, int]:
        gate = asyncio.Semaphore(STATS)

        async def look(sha256: str, size: int) -> int:
            async with gate:
                return await self._offset(manifest, sha256, size)

        found = await asyncio.gather(*(look(sha256, size) for sha256, size in manifest.blobs.items()))
        return dict(zip(manifest.blobs, found, strict=True))

    async def append(self, upload_id: str, sha256: str, offset: int, pieces: AsyncIterator[bytes]) -> int:
        """Adds to a file at its end; returns how far it is. What is whole is verified and kept."""
        manifest, _ = await self.read(upload_id)
        size = manifest.blobs.get(sha256)
        if size is None:
            raise InvalidRequest(f"the upload has no file with the SHA-256 {sha256[:64]}")
        if await self._objects.stat(blob_key(sha256)) is not None:
            if offset == size:
                return size
            raise wrong_offset(size)
        part = self._parts.setdefault((upload_id, sha256), _Part())
        owner = part.owner = object()
        try:
            async with part.lock:
                with _telling():
                    known = self._digests.pop((upload_id, sha256), None)
                    file = self._part(upload_id, sha256)
                    writer = await asyncio.to_thread(_PartWriter, file, offset, size, known)
            try:
                async for piece in pieces:
                    async with part.lock:
                        if part.owner is not owner:
                            raise Conflict("another connection continues this upload", reason="offset")
                        with _telling():
                            await asyncio.to_thread(writer.write, piece)
            finally:
                writer.close()
                if part.owner is owner and writer.offset < size:
                    self._remember((upload_id, sha256), writer)
            if writer.offset == size:
                async with part.lock:
                    await self._keep(upload_id, sha256, writer.digest())
            return writer.offset
        finally:
            if part.owner is owner:
                self._parts.pop((upload_id, sha256), None)

    async def has(self, upload_id: str) -> bool:
        return await asyncio.to_thread(self._place(upload_id).is_dir)

    async def drop(self, upload_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._place(upload_id), ignore_errors=True)

    async def expire(self, now: float) -> list[Manifest]:
        """Gives up what nobody has continued for long; returns what that was."""
        gone: list[Manifest] = []
        for place in await asyncio.to_thread(lambda: list(self._places())):
            if now - await asyncio.to_thread(_last_write, place) < self._settings.upload_expiry_s:
                continue
            with suppress(InvalidRequest):
                gone.append((await self.read(place.name))[0])
            log.info("upload_expired", upload=place.name)
            await self.drop(place.name)
        return gone

    def _remember(self, key: tuple[str, str], writer: "_PartWriter") -> None:
        """Whoever goes on need not read it all again; what is forgotten is read."""
        self._digests[key] = PartDigest(writer.sha256, writer.offset)
        if len(self._digests) > MAX_DIGESTS:
            self._digests.popitem(last=False)

    def _check(self, manifest: Manifest) -> None:
        limits = self._settings
        if len(manifest.files) > limits.max_files:
            raise RequestTooLarge(f"{len(manifest.files)} files are over registry.max_files ({limits.max_files})")
        if manifest.size_bytes > limits.max_model_bytes:
            raise RequestTooLarge(
                f"{manifest.size_bytes} bytes are over registry.max_model_bytes ({limits.max_model_bytes})"
            )

    def _make(self, manifest: Manifest, facts: ModelFacts) -> None:
        place = self._place(manifest.digest)
        if (place / "manifest.json").is_file():
            (place / "facts.json").write_text(facts.model_dump_json())
            return
        if sum(1 for _ in self._places()) >= self._settings.max_uploads:
            raise Overloaded(f"registry.max_uploads ({self._settings.max_uploads}) uploads are not finished; try later")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / "facts.json").write_text(facts.model_dump_json())
        draft = place / "manifest.tmp"
        draft.write_bytes(manifest.encoded)
        os.replace(draft, place / "manifest.json")

    async def _offset(self, manifest: Manifest, sha256: str, size: int) -> int:
        if await self._objects.stat(blob_key(sha256)) is not None:
            return size
        file = self._part(manifest.digest, sha256)
        if size == 0:
            await asyncio.to_thread(file.touch)
        there = await asyncio.to_thread(_size_of, file)
        if there < size:
            return max(0, there)
        if there > size:
            await asyncio.to_thread(file.unlink)
            return 0
        # It is whole: it is empty, or a restart came before it was kept.
        try:
            await self._keep(manifest.digest, sha256, await asyncio.to_thread(_digest_of, file))
        except Corrupted:
            return 0
        return size

    async def _keep(self, upload_id: str, sha256: str, found: str) -> None:
        file = self._part(upload_id, sha256)
        if found != sha256:
            await asyncio.to_thread(file.unlink, missing_ok=True)
            raise Corrupted(f"what came has the SHA-256 {found}, not {sha256}: it is thrown away, send the file again")
        await self._objects.put(blob_key(sha256), file)

    def _places(self) -> Iterator[Path]:
        if self._folder.is_dir():
            yield from (child for child in self._folder.iterdir() if child.is_dir())

    def _place(self, upload_id: str) -> Path:
        if not re.fullmatch(DIGEST, upload_id):
            raise NotFound("an upload's id is the SHA-256 of its manifest", reason="unknown_upload")
        return self._folder / upload_id

    def _part(self, upload_id: str, sha256: str) -> Path:
        return self._place(upload_id) / f"{sha256}.part"


class PartDigest(NamedTuple):
    sha256: Any  # of as many bytes, and goes on
    offset: int


class _PartWriter:
    """Blocks: for a thread."""

    def __init__(self, file: Path, offset: int, size: int, known: PartDigest | None) -> None:
        there = max(0, _size_of(file))
        if there != offset:
            raise wrong_offset(there)
        self.offset = offset
        self._size = size
        if known is not None and known.offset == offset:
            self.sha256 = known.sha256
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
            raise InvalidRequest(f"more came than the {self._size} bytes that the manifest tells of the file")
        disk = os.fstatvfs(self._fd)
        if disk.f_bavail * disk.f_frsize < SMALL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what else the manager keeps there needs some
        left = memoryview(piece)
        while left:
            written = os.write(self._fd, left)
            self.sha256.update(left[:written])
            self.offset += written
            left = left[written:]

    def digest(self) -> str:
        return str(self.sha256.hexdigest())

    def close(self) -> None:
        os.close(self._fd)


def wrong_offset(offset: int) -> Conflict:
    return Conflict(f"{offset} bytes of the file are there: go on from there", reason="offset", offset=str(offset))


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"the registry's disk cannot be written: {reason}; what came before is kept") from error


def _size_of(file: Path) -> int:
    """-1: it is not there."""
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return -1


def _last_write(place: Path) -> float:
    try:
        return max((child.lstat().st_mtime for child in place.iterdir()), default=place.lstat().st_mtime)
    except FileNotFoundError:
        return time.time()


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
