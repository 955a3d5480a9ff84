"""The disk cache of models from a registry: verified, bounded, and shared by all processes of a host.

`<digest>/` is a complete, verified version: its manifest, and the model's folder as in a repository.
`.fetch-<digest>/` is an incomplete version. Users of a version hold a shared lock on `<digest>.lock`, whose
modification time is the time of the last use; removal needs an exclusive lock. A downloading process locks
`.fetch-<digest>.lock`, and other processes wait.
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
from penstock.features.registry.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestFile, read_manifest

log = structlog.get_logger()
LOCK_S = 0.1  # between two attempts to lock
ATTEMPTS = 3  # to download a file with the right SHA-256
ENTRY = re.compile(r"(?:\.fetch-)?([0-9a-f]{64})")
MANIFEST = "manifest.json"


class RegistryFiles(Protocol):
    """A source of files: a manager, or the object store."""

    def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]: ...


class OpenedModel:
    """A version on disk, which is not removed until this object is closed."""

    def __init__(self, folder: Path, lock: int | None = None) -> None:
        """Wrap the folder. `lock` is the open lock file, or None if the folder is not part of the cache."""
        self.folder = folder  # of the model, as in a repository
        self._lock = lock

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


class ModelCache:
    """A folder of downloaded versions with a size limit."""

    def __init__(self, folder: Path, max_bytes: int, source: RegistryFiles) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._source = source

    async def open(self, digest: str) -> OpenedModel:
        """Open the version whose manifest has this digest; download the version if it is missing or damaged."""
        try:
            lock = await self._lock_in_use(digest)
            try:
                manifest = await self._find_verified(digest)
                if manifest is None:
                    async with self._lock_fetch(digest):
                        manifest = await self._find_verified(digest) or await self._fetch(digest)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(f"the model cache {self._folder} cannot be used: {reason}") from error
        return OpenedModel(self._folder / digest / manifest.model, lock)

    async def _lock_in_use(self, digest: str) -> int:
        """Take a shared lock on the version; processes that remove the version need an exclusive lock."""
        file = self._folder / f"{digest}.lock"
        await asyncio.to_thread(lambda: self._folder.mkdir(mode=0o700, parents=True, exist_ok=True))
        while True:
            lock = _open_lock(file)
            if _try_lock(lock, fcntl.LOCK_SH) and _is_locked_file(lock, file):
                os.utime(file)
                return lock
            os.close(lock)
            await asyncio.sleep(LOCK_S)

    async def _find_verified(self, digest: str) -> Manifest | None:
        """Return the manifest of the version in the cache, or None if the version is missing or damaged."""
        path = self._folder / digest
        manifest = await asyncio.to_thread(_read_manifest, path / MANIFEST, digest)
        if manifest is None:
            return None
        wrong = await asyncio.to_thread(_find_wrong_files, path / manifest.model, manifest)
        if wrong:
            log.warning("model_cache_corrupted", model=manifest.model, version=manifest.version, files=wrong[:8])
        return None if wrong else manifest

    @asynccontextmanager
    async def _lock_fetch(self, digest: str) -> AsyncIterator[None]:
        lock = _open_lock(self._folder / f".fetch-{digest}.lock")
        try:
            while not _try_lock(lock, fcntl.LOCK_EX):  # noqa: ASYNC110 - another process holds the lock
                await asyncio.sleep(LOCK_S)
            yield
        finally:
            os.close(lock)

    async def _fetch(self, digest: str) -> Manifest:
        draft = self._folder / f".fetch-{digest}"
        manifest = await self._fetch_manifest(digest)
        await asyncio.to_thread(self._prepare_draft, draft, manifest)
        log.info(
            "model_download_started", model=manifest.model, version=manifest.version, size_bytes=manifest.size_bytes
        )
        for file in manifest.files:
            await self._fetch_file(draft / manifest.model / file.path, file)
        await asyncio.to_thread(_replace_folder, draft, self._folder / digest)
        return manifest

    async def _fetch_manifest(self, digest: str) -> Manifest:
        data = b""
        async for piece in self._source.read(digest, is_manifest=True):
            data += piece
            if len(data) > MAX_MANIFEST_BYTES:
                break
        if hashlib.sha256(data).hexdigest() != digest:
            raise Corrupted(f"the manifest {digest} has another SHA-256: the registry's files are damaged")
        return read_manifest(data)

    async def _fetch_file(self, target: Path, file: ManifestFile) -> None:
        for _ in range(ATTEMPTS):
            if await asyncio.to_thread(_is_intact, target, file):
                return
            there = await asyncio.to_thread(_count_resumable_bytes, target, file)
            with target.open("ab") as opened:
                async for piece in self._source.read(file.sha256, there):
                    there += len(piece)
                    if there > file.size_bytes:
                        break
                    await asyncio.to_thread(opened.write, piece)
                opened.flush()
                await asyncio.to_thread(os.fsync, opened.fileno())
            if await asyncio.to_thread(_is_intact, target, file):
                return
            log.warning("downloaded_file_corrupted", file=file.path, sha256=file.sha256)
            await asyncio.to_thread(target.unlink)
        raise Corrupted(f"'{file.path}' was downloaded {ATTEMPTS} times with another SHA-256 than in its manifest")

    def _prepare_draft(self, draft: Path, manifest: Manifest) -> None:
        """Make room, write the manifest that records the reserved size, and reuse files of a damaged version."""
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
            if not target.exists() and _is_intact(there / file.path, file):
                os.link(there / file.path, target)

    def _make_room(self, manifest: Manifest) -> None:
        """Remove unused versions, least recently used first."""
        if manifest.size_bytes > self._max_bytes:
            raise ConfigError(
                f"model '{manifest.model}' has {manifest.size_bytes} bytes, more than registry.cache_bytes "
                f"({self._max_bytes}): increase the setting"
            )
        entries: dict[str, list[Path]] = {}
        for child in self._folder.iterdir():
            if (found := ENTRY.fullmatch(child.name)) and found[1] != manifest.digest:
                entries.setdefault(found[1], []).append(child)
        sizes = {digest: max(map(_read_version_size, paths)) for digest, paths in entries.items()}
        over = sum(sizes.values()) + manifest.size_bytes - self._max_bytes
        for digest in sorted(entries, key=lambda each: _read_last_use(self._folder / f"{each}.lock")):
            if over > 0 and self._evict(digest, entries[digest]):
                over -= sizes[digest]
        if over > 0:
            raise Unavailable(
                f"the model cache has no room for '{manifest.model}' ({manifest.size_bytes} bytes) next to the "
                "models in use: increase registry.cache_bytes"
            )

    def _evict(self, digest: str, paths: list[Path]) -> bool:
        file = self._folder / f"{digest}.lock"
        lock = _open_lock(file)
        try:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return False
            log.info("model_cache_evicted", digest=digest)
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)
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


def _is_locked_file(lock: int, file: Path) -> bool:
    """Return whether the path still leads to the locked file, which another process may have replaced."""
    try:
        return os.path.samestat(os.fstat(lock), file.stat())
    except FileNotFoundError:
        return False


def _read_manifest(file: Path, digest: str) -> Manifest | None:
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return read_manifest(data) if hashlib.sha256(data).hexdigest() == digest else None


def _find_wrong_files(folder: Path, manifest: Manifest) -> list[str]:
    return [file.path for file in manifest.files if not _is_intact(folder / file.path, file)]


def _is_intact(path: Path, file: ManifestFile) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size_bytes:
            return False
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    except (FileNotFoundError, NotADirectoryError):
        return False


def _count_resumable_bytes(path: Path, file: ManifestFile) -> int:
    """Return the number of bytes of an interrupted download; remove a complete file that has wrong content."""
    try:
        there = path.lstat().st_size
    except FileNotFoundError:
        return 0
    if there < file.size_bytes:
        return there
    path.unlink()
    return 0


def _replace_folder(draft: Path, path: Path) -> None:
    """Replace the folder. Processes keep their open files in the old folder."""
    old = path.with_name(f".gone-{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(path, old)
    os.rename(draft, path)
    shutil.rmtree(old, ignore_errors=True)


def _read_version_size(path: Path) -> int:
    """Return the size of the complete version."""
    try:
        return read_manifest((path / MANIFEST).read_bytes()).size_bytes
    except (OSError, PenstockError):
        return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def _read_last_use(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
