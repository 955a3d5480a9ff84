"""The object store: whole objects under keys, read in ranges. Which one it is, its URL says."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from penstock.core.config import S3Settings
from penstock.core.errors import ConfigError

READ_BYTES = 1024 * 1024  # of a piece that is read at once


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    size_bytes: int
    modified_s: float  # since 1970


class ObjectStore(Protocol):
    """Keys are parts with slashes between them. What fails and may not fail later raises Unavailable."""

    async def put(self, key: str, source: Path | AsyncIterator[bytes]) -> None:
        """It is there whole, or as it was before; a file that is given is taken over, and is gone afterwards."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Pieces of the bytes from `start` up to `end`; raises FileNotFoundError."""
        ...

    async def stat(self, key: str) -> StoredObject | None: ...

    def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """All whose keys begin with these parts, in no order."""
        ...

    async def delete(self, key: str) -> None:
        """Also what is not there."""
        ...


def open_objects(url: str, default: Path, s3: S3Settings) -> ObjectStore:
    """A path, `file:///…` or `s3://bucket/prefix`; empty: the default folder."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from penstock.storage.objects.s3 import S3Objects

        return S3Objects(url, s3)
    from penstock.storage.objects.folder import FolderObjects

    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderObjects(Path(unquote(parts.path)))
    if "://" in url:
        raise ConfigError(f"registry.objects '{parts.scheme}://…': must be a path, file:///PATH or s3://BUCKET/PREFIX")
    return FolderObjects(Path(url) if url else default)
