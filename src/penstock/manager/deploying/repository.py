"""A folder of models: which there are, and what is written so that they are deployed as they are there."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.manager.deploying.deployment import Choice, Deployment
from penstock.manager.desired import DesiredState, FolderRecord
from penstock.models.folder import NAME, ModelFolder, list_model_folders, read_model_folder, read_version
from penstock.storage.metadata.base import MAX_WRITES, Write

log = structlog.get_logger()
MAX_SPARES = 3  # older versions that are tried where the latest does not load, and none serves


class Repository:
    def __init__(self, folder: Path | None, state: DesiredState) -> None:
        """Without a folder it has no models."""
        self._folder = folder
        self._state = state

    async def find(self, model: str) -> ModelFolder | None:
        if self._folder is None or not NAME.match(model) or not (self._folder / model / "model.yaml").is_file():
            return None
        return await asyncio.to_thread(read_model_folder, self._folder / model)

    async def choose(self, model: str, version: str) -> Choice | None:
        """Without a version, as the model's folder says."""
        folder = await self.find(model)
        if folder is None:
            return None
        path = str(await asyncio.to_thread(folder.path.resolve))
        if not version:
            return Choice(model, path, folder.versions, folder.older[:MAX_SPARES])
        await asyncio.to_thread(read_version, folder.path, version)
        return Choice(model, path, [version])

    async def check(self) -> None:
        """Raises where a model.yaml has a fault."""
        for path in await self._paths():
            await asyncio.to_thread(read_model_folder, path)

    async def plan(
        self, deployment: Deployment, is_governed: Callable[[str], bool], may_remove: bool
    ) -> list[list[Write]]:
        """What of it is not deployed as it is there, each list for one commit; what somebody unloaded stays unloaded.

        Of several managers, another may have the folders that this one has not: then none `may_remove` models.
        """
        changes, paths = [], await self._paths()
        if may_remove and self._folder is not None:
            source = str(await asyncio.to_thread(self._folder.resolve))
            changes.append(deployment.remove_folders(source, {path.name for path in paths}))
        for path in paths:
            try:
                folder = await asyncio.to_thread(read_model_folder, path)
            except ConfigError as error:
                log.error("not_deployed", model=path.name, error=error.message)
                continue
            name, record = folder.name, record_of(folder)
            if is_governed(name):
                log.info("governed_by_rollout", model=name)
            elif self._state.is_unloaded(name):
                log.info("stays_unloaded", model=name)
            elif self._state.folders.get(name) != record or not self._state.of_model(name):
                changes.append(deployment.deploy_folder(name, record))
                log.info("deployed", model=name, versions=list(folder.versions))
        return _joined(changes)

    async def _paths(self) -> list[Path]:
        return [] if self._folder is None else await asyncio.to_thread(list_model_folders, self._folder)


def record_of(folder: ModelFolder) -> FolderRecord:
    return FolderRecord(source=str(folder.path.resolve()), versions=folder.versions, older=folder.older[:MAX_SPARES])


def _joined(changes: list[list[Write]]) -> list[list[Write]]:
    """As few commits as hold them, none of them parted: a model is deployed all or none."""
    joined: list[list[Write]] = [[]]
    for change in changes:
        if joined[-1] and len(joined[-1]) + len(change) > MAX_WRITES:
            joined.append([])
        joined[-1] += change
    return joined
