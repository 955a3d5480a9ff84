"""Objects as files below a folder."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from math import inf
from pathlib import Path
from typing import BinaryIO

from penstock.core.errors import Unavailable
from penstock.storage.objects.base import READ_BYTES, StoredObject

TEMPORARY = ".put-"  # before the name of what is not whole


class FolderObjects:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    async def put(self, key: str, source: Path | AsyncIterator[bytes]) -> None:
        target = self._path(key)
        try:
            if not isinstance(source, Path):
                await self._put_pieces(target, source)
            elif not await asyncio.to_thread(_move, source, target):
                await self._put_pieces(target, _pieces(source))
                await asyncio.to_thread(source.unlink)
        except OSError as error:
            raise _unavailable(error) from error

    async def get(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        async for piece in _pieces(self._path(key), start, end):
            yield piece

    async def stat(self, key: str) -> StoredObject | None:
        return await asyncio.to_thread(self._stat, self._path(key))

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        for found in await asyncio.to_thread(lambda: list(self._walk(self._path(prefix)))):
            yield found

    async def delete(self, key: str) -> None:
        try:
            await asyncio.to_thread(self._path(key).unlink, missing_ok=True)
        except OSError as error:
            raise _unavailable(error) from error

    def _path(self, key: str) -> Path:
        parts = [part for part in key.split("/") if part]
        assert not any(part.startswith(".") for part in parts), "keys are made here, and never hidden"
        return self._folder.joinpath(*parts)

    def _stat(self, path: Path) -> StoredObject | None:
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return StoredObject(path.relative_to(self._folder).as_posix(), found.st_size, found.st_mtime)

    def _walk(self, path: Path) -> Iterator[StoredObject]:
        for folder, _, names in os.walk(path):
            for name in names:
                found = None if name.startswith(TEMPORARY) else self._stat(Path(folder, name))
                if found is not None:
                    yield found

    async def _put_pieces(self, target: Path, pieces: AsyncIterator[bytes]) -> None:
        draft = target.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
        opened = await asyncio.to_thread(_create, draft)
        try:
            async for piece in pieces:
                await asyncio.to_thread(opened.write, piece)
            await asyncio.to_thread(_settle, opened)
            await asyncio.to_thread(os.replace, draft, target)
        finally:
            opened.close()
            draft.unlink(missing_ok=True)


async def _pieces(path: Path, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
    opened = await asyncio.to_thread(path.open, "rb")
    with opened:
        opened.seek(start)
        left = inf if end is None else end - start
        while left > 0 and (piece := await asyncio.to_thread(opened.read, int(min(READ_BYTES, left)))):
            left -= len(piece)
            yield piece


def _create(file: Path) -> BinaryIO:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _settle(opened: BinaryIO) -> None:
    opened.flush()
    os.fsync(opened.fileno())


def _move(source: Path, target: Path) -> bool:
    """False where it lies on another file system, and must be copied."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if source.stat().st_dev != target.parent.stat().st_dev:
        return False
    with source.open("rb") as opened:
        os.fsync(opened.fileno())
    os.replace(source, target)
    return True


def _unavailable(error: OSError) -> Unavailable:
    return Unavailable(f"the registry's folder cannot be used: {error.strerror or error}")
