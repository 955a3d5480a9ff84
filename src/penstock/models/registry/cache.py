"""Models that were fetched from a registry, on disk: verified, bounded, and shared by all processes of a host.

`<digest>/` is a version, whole and verified: its manifest, and the model's folder as a repository has it.
`.fetch-<digest>/` is one on its way. Who uses a version shares a lock on `<digest>.lock`, whose age is when it was last
asked for: what goes must be locked alone. Who fetches it locks `.fetch-<digest>.lock`, so that others wait and look.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import structlog

from penstock.core.errors import ConfigError, Corrupted, PenstockError, Unavailable
from penstock.core.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestFile, read_manifest

log = structlog.get_logger()
LOCK_S = 0.1  # between looks at what somebody else has locked
ATTEMPTS = 3  # of a file whose SHA-256 is not right
ENTRY = re.compile(r"(?:\.fetch-)?([0-9a-f]{64})")
MANIFEST = "manifest.json"


class RegistryFiles(Protocol):
    """Where files come from: a manager, or the object store itself."""

    def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]: ...


class OpenedModel:
    """A version on disk, which stays for as long as this is not closed."""

    def __init__(self, folder: Path, lock: int | None = None) -> None:
        """Without a lock the folder is somebody else's, who keeps it."""
        self.folder = folder  # the model's, as in a repository
        self._lock = lock

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


class ModelCache:
    def __init__(self, folder: Path, max_bytes: int, source: RegistryFiles) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._source = source

    async def open(self, digest: str) -> OpenedModel:
        """The version of this manifest; fetched where it is not there, or not as it should be."""
        try:
            lock = await self._use(digest)
            try:
                manifest = await self._ready(digest)
                if manifest is None:
                    async with self._fetching(digest):
                        manifest = await self._ready(digest) or await self._fetch(digest)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(f"the model cache {self._folder} cannot be used: {reason}") from error
        return OpenedModel(self._folder / digest / manifest.model, lock)

    async def _use(self, digest: str) -> int:
        """A lock that keeps it from going; it is free, or shared, but for the moment in which it goes."""
        file = self._folder / f"{digest}.lock"
        await asyncio.to_thread(lambda: self._folder.mkdir(mode=0o700, parents=True, exist_ok=True))
        while True:
            lock = _open_lock(file)
            if _try_lock(lock, fcntl.LOCK_SH) and _is_file_of(lock, file):
                os.utime(file)
                return lock
            os.close(lock)
            await asyncio.sleep(LOCK_S)

    async def _ready(self, digest: str) -> Manifest | None:
        """None: it is not there as it should be."""
        place = self._folder / digest
        manifest = await asyncio.to_thread(_read, place / MANIFEST, digest)
        if manifest is None:
            return None
        wrong = await asyncio.to_thread(_wrong_files, place / manifest.model, manifest)
        if wrong:
            log.warning("model_cache_corrupted", model=manifest.model, version=manifest.version, files=wrong[:8])
        return None if wrong else manifest

    @asynccontextmanager
    async def _fetching(self, digest: str) -> AsyncIterator[None]:
        lock = _open_lock(self._folder / f".fetch-{digest}.lock")
        try:
            while not _try_lock(lock, fcntl.LOCK_EX):  # noqa: ASYNC110 - another process has it
                await asyncio.sleep(LOCK_S)
            yield
        finally:
            os.close(lock)

    async def _fetch(self, digest: str) -> Manifest:
        draft = self._folder / f".fetch-{digest}"
        manifest = await self._fetch_manifest(digest)
        await asyncio.to_thread(self._begin, draft, manifest)
        log.info("fetching", model=manifest.model, version=manifest.version, size_bytes=manifest.size_bytes)
        for file in manifest.files:
            await self._fetch_file(draft / manifest.model / file.path, file)
        await asyncio.to_thread(_take_place, draft, self._folder / digest)
        return manifest

    async def _fetch_manifest(self, digest: str) -> Manifest:
        data = b""
        async for piece in self._source.read(digest, is_manifest=True):
            data += piece
            if len(data) > MAX_MANIFEST_BYTES:
                break
        if hashlib.sha256(data).hexdigest() != digest:
            raise Corrupted(f"the manifest {digest} came with another SHA-256: the registry's files are damaged")
        return read_manifest(data)

    async def _fetch_file(self, target: Path, file: ManifestFile) -> None:
        """Goes on where an earlier attempt was cut."""
        for _ in range(ATTEMPTS):
            if await asyncio.to_thread(_is_right, target, file):
                return
            there = await asyncio.to_thread(_begun, target, file)
            with target.open("ab") as opened:
                async for piece in self._source.read(file.sha256, there):
                    there += len(piece)
                    if there > file.size_bytes:
                        break
                    await asyncio.to_thread(opened.write, piece)
                opened.flush()
                await asyncio.to_thread(os.fsync, opened.fileno())
            if await asyncio.to_thread(_is_right, target, file):
                return
            log.warning("fetched_corrupted", file=file.path, sha256=file.sha256)
            await asyncio.to_thread(target.unlink)
        raise Corrupted(f"'{file.path}' came {ATTEMPTS} times with another SHA-256 than its manifest's")

    def _begin(self, draft: Path, manifest: Manifest) -> None:
        """Makes room, and says for how much; what is there of it already is taken over."""
        room = _open_lock(self._folder / ".room.lock")
        try:
            fcntl.flock(room, fcntl.LOCK_EX)
            self._make_room(manifest)
            (draft / manifest.model).mkdir(mode=0o700, parents=True, exist_ok=True)
            (draft / MANIFEST).write_bytes(manifest.encoded)
        finally:
            os.close(room)
        there = self._folder / manifest.digest / manifest.model
        for file in manifest.files:
            target = draft / manifest.model / file.path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not target.exists() and _is_right(there / file.path, file):
                os.link(there / file.path, target)

    def _make_room(self, manifest: Manifest) -> None:
        """Takes away what nobody uses, the least recently used first."""
        if manifest.size_bytes > self._max_bytes:
            raise ConfigError(
                f"model '{manifest.model}' has {manifest.size_bytes} bytes, over registry.cache_bytes "
                f"({self._max_bytes}): raise it"
            )
        entries: dict[str, list[Path]] = {}
        for child in self._folder.iterdir():
            if (found := ENTRY.fullmatch(child.name)) and found[1] != manifest.digest:
                entries.setdefault(found[1], []).append(child)
        sizes = {digest: max(map(_size_of, places)) for digest, places in entries.items()}
        over = sum(sizes.values()) + manifest.size_bytes - self._max_bytes
        for digest in sorted(entries, key=lambda each: _age(self._folder / f"{each}.lock")):
            if over > 0 and self._evict(digest, entries[digest]):
                over -= sizes[digest]
        if over > 0:
            raise Unavailable(
                f"the model cache has no room for '{manifest.model}' ({manifest.size_bytes} bytes) beside what is "
                "in use: raise registry.cache_bytes"
            )

    def _evict(self, digest: str, places: list[Path]) -> bool:
        file = self._folder / f"{digest}.lock"
        lock = _open_lock(file)
        try:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return False
            log.info("model_cache_evicted", digest=digest)
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
            (self._folder / f".fetch-{digest}.lock").unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)


def _open_lock(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file_of(lock: int, file: Path) -> bool:
    """False: it went between its being opened and being locked, and others lock another one."""
    try:
        return os.path.samestat(os.fstat(lock), file.stat())
    except FileNotFoundError:
        return False


def _read(file: Path, digest: str) -> Manifest | None:
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return read_manifest(data) if hashlib.sha256(data).hexdigest() == digest else None


def _wrong_files(folder: Path, manifest: Manifest) -> list[str]:
    return [file.path for file in manifest.files if not _is_right(folder / file.path, file)]


def _is_right(path: Path, file: ManifestFile) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size_bytes:
            return False
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    except (FileNotFoundError, NotADirectoryError):
        return False


def _begun(path: Path, file: ManifestFile) -> int:
    """Bytes that are there of what was cut; what is whole, and wrong, goes."""
    try:
        there = path.lstat().st_size
    except FileNotFoundError:
        return 0
    if there < file.size_bytes:
        return there
    path.unlink()
    return 0


def _take_place(draft: Path, place: Path) -> None:
    """Who has files of the old one open keeps them."""
    gone = place.with_name(f".gone-{place.name}")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(place, gone)
    os.rename(draft, place)
    shutil.rmtree(gone, ignore_errors=True)


def _size_of(place: Path) -> int:
    """What it takes when it is whole."""
    try:
        return read_manifest((place / MANIFEST).read_bytes()).size_bytes
    except (OSError, PenstockError):
        return sum(file.lstat().st_size for file in place.rglob("*") if file.is_file())


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
