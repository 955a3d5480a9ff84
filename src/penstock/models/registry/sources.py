"""Where a block's files are: in a folder, or in the registry, from which they are fetched first."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from pathlib import Path

from penstock.core.config import Config
from penstock.core.errors import Unavailable, UnknownModel
from penstock.core.manifest import SOURCE
from penstock.models.registry.cache import ModelCache, OpenedModel, RegistryFiles
from penstock.storage.objects.base import ObjectStore, open_objects
from penstock.storage.objects.keys import blob_key, manifest_key
from penstock.wire.channels import Channels

GIVE_UP_S = 120.0  # without a byte
ONE_S = 2.0  # what one manager gets without a byte; another may lead by then
PAUSE_S = 0.5


class ModelSources:
    """Opens nothing before a block asks for it."""

    def __init__(self, config: Config, manager: Callable[[], str] = str) -> None:
        """`manager` tells the address of the one that leads just now; empty: none."""
        self._config = config
        self._manager = manager

    async def open(self, source: str) -> OpenedModel:
        """Raises what is wrong with it; what is fetched is verified."""
        if not source.startswith(SOURCE):
            return OpenedModel(Path(source))
        return await self._cache.open(source.removeprefix(SOURCE))

    @cached_property
    def _cache(self) -> ModelCache:
        settings, data = self._config.registry, self._config.data_dir
        folder = Path(settings.cache_dir) if settings.cache_dir else data / "model-cache"
        return ModelCache(folder, settings.cache_bytes, self._files())

    def _files(self) -> RegistryFiles:
        settings = self._config.registry
        if settings.is_direct:
            return StoredFiles(open_objects(settings.objects, self._config.data_dir / "objects", self._config.s3))
        return ManagersFiles(self._manager, Channels.of(self._config))


class ManagersFiles:
    """From the manager, whoever that is by then."""

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
        from penstock.client.registry import RegistryClient  # few workers need it

        if not (address := self._manager()):
            raise Unavailable("no manager is known that a model could be fetched from; try again")
        async with RegistryClient(address, give_up_s=ONE_S, channels=self._channels) as client:
            async for piece in client.read(sha256, offset, is_manifest=is_manifest):
                yield piece


class StoredFiles:
    """Straight from the object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    async def read(self, sha256: str, offset: int = 0, *, is_manifest: bool = False) -> AsyncIterator[bytes]:
        try:
            async for piece in self._objects.get((manifest_key if is_manifest else blob_key)(sha256), offset):
                yield piece
        except FileNotFoundError:
            raise UnknownModel(f"the registry has no file with the SHA-256 {sha256[:64]}") from None
