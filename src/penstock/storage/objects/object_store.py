"""The interface of object stores, which store complete objects by key; opens the store that a URL names."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from penstock.core.config import S3Settings
from penstock.core.errors import ConfigError

READ_BYTES = 1024 * 1024  # per read


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    size_bytes: int
    modified_s: float  # since 1970


class ObjectStore(Protocol):
    """A store whose keys are parts separated by slashes. Temporary failures raise Unavailable."""

    async def put(self, key: str, source: Path | AsyncIterator[bytes]) -> None:
        """Store an object completely or not at all. A source file is moved into the store."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes from `start` up to `end` in pieces; raise FileNotFoundError."""
        ...

    async def stat(self, key: str) -> StoredObject | None: ...

    def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yield the objects whose keys begin with the parts in `prefix`, in no particular order."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; do nothing if it does not exist."""
        ...


def open_objects(url: str, default: Path, s3: S3Settings) -> ObjectStore:
    """Open the store at a path, `file:///…` or `s3://bucket/prefix`. An empty URL means the default folder."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from penstock.storage.objects.s3 import S3Objects

        return S3Objects(url, s3)
    from penstock.storage.objects.folder_objects import FolderObjects

    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderObjects(Path(unquote(parts.path)))
    if "://" in url:
        raise ConfigError(f"registry.objects '{parts.scheme}://…': must be a path, file:///PATH or s3://BUCKET/PREFIX")
    return FolderObjects(Path(url) if url else default)
