"""The sources of a block's files: a folder, or the registry, from which files are fetched."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from pathlib import Path

from penstock.core.blocks import REGISTRY_SOURCE
from penstock.core.config import Config
from penstock.core.errors import Unavailable, UnknownModel
from penstock.features.registry.model_cache import ModelCache, OpenedModel, RegistryFiles
from penstock.storage.objects.object_names import make_blob_key, make_manifest_key
from penstock.storage.objects.object_store import ObjectStore, open_objects
from penstock.wire.channels import Channels

GIVE_UP_S = 120.0  # a download fails after this time without a byte
ONE_S = 2.0  # after this time without a byte, the current leader is looked up again
PAUSE_S = 0.5


class ModelSources:
    """Opens the sources of blocks; connections are made on first use."""

    def __init__(self, config: Config, manager: Callable[[], str] = str) -> None:
        """Create the sources. `manager` returns the address of the leading manager, or an empty string."""
        self._config = config
        self._manager = manager

    async def open(self, source: str) -> OpenedModel:
        """Open the files of a block. Files that are fetched from the registry are verified."""
        if not source.startswith(REGISTRY_SOURCE):
            return OpenedModel(Path(source))
        return await self._cache.open(source.removeprefix(REGISTRY_SOURCE))

    @cached_property
    def _cache(self) -> ModelCache:
        settings, data = self._config.registry, self._config.data_dir
        folder = Path(settings.cache_dir) if settings.cache_dir else data / "model-cache"
        return ModelCache(folder, settings.cache_bytes, self._files())

    def _files(self) -> RegistryFiles:
        settings = self._config.registry
        if settings.is_direct:
            return StoredFiles(open_objects(settings.objects, self._config.data_dir / "objects", self._config.s3))
        return ManagersFiles(self._manager, Channels.from_config(self._config))


class ManagersFiles:
    """Reads the files of registered models from the leading manager."""

    def __init__(self, manager: Callable[[], str], channels: Channels) -> None:
        self._manager = manager
        self._channels = channels

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        began = time.monotonic()
        while True:
            try:
                async for piece in self._read(sha256, offset, is_manifest):
                    offset += len(piece)
                    began = time.monotonic()
                    yield piece
                return
            except Unavailable:
                if time.monotonic() - began > GIVE_UP_S:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _read(self, sha256: str, offset: int, is_manifest: bool) -> AsyncIterator[bytes]:
        from penstock.client.registry import RegistryClient  # imported only if needed

        if not (address := self._manager()):
            raise Unavailable("no leading manager is known to fetch the model from; try again")
        async with RegistryClient(address, give_up_s=ONE_S, channels=self._channels) as client:
            async for piece in client.read(sha256, offset, is_manifest=is_manifest):
                yield piece


class StoredFiles:
    """Reads the files of registered models from the object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        try:
            async for piece in self._objects.get((make_manifest_key if is_manifest else make_blob_key)(sha256), offset):
                yield piece
        except FileNotFoundError:
            raise UnknownModel(f"the registry has no file with the SHA-256 {sha256[:64]}") from None
