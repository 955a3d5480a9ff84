"""An object store in a bucket of an S3-compatible service."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from penstock.core.config import S3Settings
from penstock.core.errors import ConfigError, Unavailable
from penstock.storage.objects.object_store import READ_BYTES, StoredObject
from penstock.wire.credentials.tls_files import read_pem

PART_BYTES = 8 * 1024 * 1024
PARTS = 9000  # of the 10,000 that a multipart upload may have
AT_ONCE = 4
# Timeouts of one request, which may transfer many gigabytes, and of one read from its connection.
TIMEOUT, READ_TIMEOUT = timedelta(hours=6), timedelta(seconds=30)
RETRY: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}


class S3Objects:
    def __init__(self, url: str, settings: S3Settings) -> None:
        """Open the bucket in `url`. Empty settings take their values from the usual AWS_… variables."""
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query:
            raise ConfigError("registry.objects: write s3://BUCKET/PREFIX; keys and endpoint are settings below s3")
        given: dict[str, Any] = {"virtual_hosted_style_request": settings.is_virtual_hosted}
        for name in ("endpoint", "region", "access_key_id"):
            if value := getattr(settings, name):
                given[name] = value
        if settings.secret_access_key is not None:
            given["secret_access_key"] = settings.secret_access_key.get_secret_value()
        options: Any = {
            "timeout": TIMEOUT,
            "read_timeout": READ_TIMEOUT,
            "allow_http": True,
        }
        if settings.ca:
            options["root_certificate"] = read_pem(settings.ca, "s3.ca")
        self._bucket = parts.hostname
        try:
            self._store = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                config=given,  # type: ignore[arg-type]
                client_options=options,
                retry_config=RETRY,
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"registry.objects: s3://{self._bucket}: {_describe_reason(error)}") from error

    async def put(self, key: str, source: Path | AsyncIterator[bytes]) -> None:
        part = PART_BYTES
        if isinstance(source, Path):
            part = max(part, -(-(await asyncio.to_thread(source.stat)).st_size // PARTS))
        with self._translate_errors("written"):
            await obstore.put_async(self._store, key, source, chunk_size=part, max_concurrency=AT_ONCE)
        if isinstance(source, Path):
            await asyncio.to_thread(source.unlink)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of a range. If the server ignores ranges (rclone), read the object from the beginning."""
        found = await self.stat(key)
        if found is None:
            raise FileNotFoundError(key)
        last = found.size_bytes if end is None else min(end, found.size_bytes)
        if start >= last:
            return
        with self._translate_errors("read"):
            got, at = await self._open_range(key, start, last, found.size_bytes)
            async for piece in got.stream(READ_BYTES):
                wanted = piece[max(0, start - at) : last - at]
                at += len(piece)
                if wanted:
                    yield bytes(wanted)
                if at >= last:
                    return

    async def _open_range(self, key: str, start: int, end: int, size_bytes: int) -> tuple[Any, int]:
        """Return a stream, and the position in the object at which the stream begins."""
        if (start, end) != (0, size_bytes):
            try:
                return await obstore.get_async(self._store, key, options={"range": (start, end)}), start
            except BaseError as error:
                if "non-partial" not in str(error):
                    raise
        return await obstore.get_async(self._store, key), 0

    async def stat(self, key: str) -> StoredObject | None:
        with self._translate_errors("read"):
            try:
                return _to_stored_object(await obstore.head_async(self._store, key))
            except FileNotFoundError:
                return None

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        with self._translate_errors("listed"):
            async for found in obstore.list(self._store, prefix, chunk_size=1000):
                for each in found:
                    yield _to_stored_object(each)

    async def delete(self, key: str) -> None:
        with self._translate_errors("deleted"):
            try:
                await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                pass

    @contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise ConfigError(
                f"s3://{self._bucket} cannot be {action}: the store refuses the key; see s3.access_key_id and "
                "s3.secret_access_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        except BaseError as error:
            raise Unavailable(f"s3://{self._bucket} cannot be {action}: {_describe_reason(error)}") from error


def _to_stored_object(metadata: Any) -> StoredObject:
    return StoredObject(metadata["path"], metadata["size"], metadata["last_modified"].timestamp())


def _describe_reason(error: Exception) -> str:
    """Return the first line of an error's message, because further lines may contain keys from request headers."""
    return str(error).strip().split("\n", 1)[0][:300]
