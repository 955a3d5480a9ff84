"""An object store in a folder: one file per object."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from math import inf
from pathlib import Path
from typing import BinaryIO

from penstock.core.errors import Unavailable
from penstock.storage.objects.object_store import READ_BYTES, StoredObject

TEMPORARY = ".put-"  # prefix of files that are not complete yet


class FolderObjects:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    async def put(self, key: str, source: Path | AsyncIterator[bytes]) -> None:
        target = self._build_path(key)
        try:
            if not isinstance(source, Path):
                await self._put_pieces(target, source)
            elif not await asyncio.to_thread(_move_file, source, target):
                await self._put_pieces(target, _read_pieces(source))
                await asyncio.to_thread(source.unlink)
        except OSError as error:
            raise _make_unavailable_error(error) from error

    async def get(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        async for piece in _read_pieces(self._build_path(key), start, end):
            yield piece

    async def stat(self, key: str) -> StoredObject | None:
        return await asyncio.to_thread(self._stat_object, self._build_path(key))

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        for found in await asyncio.to_thread(lambda: list(self._walk_objects(self._build_path(prefix)))):
            yield found

    async def delete(self, key: str) -> None:
        try:
            await asyncio.to_thread(self._build_path(key).unlink, missing_ok=True)
        except OSError as error:
            raise _make_unavailable_error(error) from error

    def _build_path(self, key: str) -> Path:
        parts = [part for part in key.split("/") if part]
        assert not any(part.startswith(".") for part in parts), "no part of a key begins with a dot"
        return self._folder.joinpath(*parts)

    def _stat_object(self, path: Path) -> StoredObject | None:
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return StoredObject(path.relative_to(self._folder).as_posix(), found.st_size, found.st_mtime)

    def _walk_objects(self, path: Path) -> Iterator[StoredObject]:
        for folder, _, names in os.walk(path):
            for name in names:
                found = None if name.startswith(TEMPORARY) else self._stat_object(Path(folder, name))
                if found is not None:
                    yield found

    async def _put_pieces(self, target: Path, pieces: AsyncIterator[bytes]) -> None:
        draft = target.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
        opened = await asyncio.to_thread(_create_file, draft)
        try:
            async for piece in pieces:
                await asyncio.to_thread(opened.write, piece)
            await asyncio.to_thread(_sync_file, opened)
            await asyncio.to_thread(os.replace, draft, target)
        finally:
            opened.close()
            draft.unlink(missing_ok=True)


async def _read_pieces(path: Path, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
    opened = await asyncio.to_thread(path.open, "rb")
    with opened:
        opened.seek(start)
        left = inf if end is None else end - start
        while left > 0 and (piece := await asyncio.to_thread(opened.read, int(min(READ_BYTES, left)))):
            left -= len(piece)
            yield piece


def _create_file(file: Path) -> BinaryIO:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _sync_file(opened: BinaryIO) -> None:
    opened.flush()
    os.fsync(opened.fileno())


def _move_file(source: Path, target: Path) -> bool:
    """Move a file; return False if it is on another file system and must be copied."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if source.stat().st_dev != target.parent.stat().st_dev:
        return False
    with source.open("rb") as opened:
        os.fsync(opened.fileno())
    os.replace(source, target)
    return True


def _make_unavailable_error(error: OSError) -> Unavailable:
    return Unavailable(f"the registry's folder cannot be used: {error.strerror or error}")
