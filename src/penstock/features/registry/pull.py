"""Downloads a version from the registry into a user's folder, verified and atomically."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from penstock.core.errors import InvalidRequest
from penstock.features.registry.manifest import SETTINGS_FILE
from penstock.features.registry.model_cache import ModelCache, RegistryFiles

UNBOUNDED = 2**62


class CountedFiles:
    """A source of files that reports the number of received bytes."""

    def __init__(self, files: RegistryFiles, on_progress: Callable[[int], None]) -> None:
        self._files = files
        self._on_progress = on_progress
        self._done = 0

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        async for piece in self._files.read(sha256, offset, is_manifest=is_manifest):
            if not is_manifest:
                self._done += len(piece)
                self._on_progress(self._done)
            yield piece


async def pull(files: RegistryFiles, digest: str, version: str, folder: Path) -> None:
    """Download a version, or continue a download; raise InvalidRequest if the folder has other files of the version."""
    draft = folder.parent / f".pull-{digest}"
    _check_target(folder)
    try:
        opened = await ModelCache(draft, UNBOUNDED, files).open(digest)
        try:
            await asyncio.to_thread(_move_version, opened.folder, version, folder)
        finally:
            opened.close()
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be written: {error.strerror or error}") from error


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest(f"{folder} is a file: give a folder")


def _move_version(source: Path, version: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings, target = folder / SETTINGS_FILE, folder / version
    if os.path.lexists(settings) and settings.read_bytes() != (source / SETTINGS_FILE).read_bytes():
        raise InvalidRequest(f"{settings} exists with other content: give another folder")
    if os.path.lexists(target):
        if not _has_same_files(source / version, target):
            raise InvalidRequest(f"{target} exists with other files: give another folder, or move it away")
    else:
        os.rename(source / version, target)
        _make_readable(target)
    if not os.path.lexists(settings):
        os.rename(source / SETTINGS_FILE, settings)  # last, since this file makes the folder a model
        settings.chmod(0o644)


def _has_same_files(source: Path, target: Path) -> bool:
    names = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    there = {file.relative_to(target) for file in target.rglob("*") if file.is_file()}
    return names == there and all((source / name).read_bytes() == (target / name).read_bytes() for name in names)


def _make_readable(folder: Path) -> None:
    """Make the folder readable for all users, like a repository's folders; the cache's folders are private."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
