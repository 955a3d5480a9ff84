"""Reads the model repository of a manager: a folder that contains a folder per model."""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from penstock.core.errors import ConfigError
from penstock.manager.deploying.deployment import Choice, Deployment
from penstock.manager.deploying.folder_changes import FolderState
from penstock.manager.desired_state import DesiredState, FolderRecord
from penstock.models.folder import (
    NAME,
    ModelFolder,
    find_wanted_versions,
    folder_state,
    list_model_folders,
    read_model_folder,
    read_version,
)
from penstock.storage.metadata.metadata_store import MAX_WRITES, Write

log = structlog.get_logger()
MAX_SPARES = 3  # older versions that may be loaded if the latest fails and no other version serves


class Repository:
    def __init__(self, folder: Path | None, state: DesiredState) -> None:
        """`folder` None means an empty repository."""
        self._folder = folder
        self._state = state

    async def find(self, model: str) -> ModelFolder | None:
        if self._folder is None or not NAME.match(model) or not (self._folder / model / "model.yaml").is_file():
            return None
        return await asyncio.to_thread(read_model_folder, self._folder / model)

    async def choose(self, model: str, version: str) -> Choice | None:
        """Return the given version as a Choice; if it is empty, the versions that the model's settings select."""
        folder = await self.find(model)
        if folder is None:
            return None
        path = str(await asyncio.to_thread(folder.path.resolve))
        if not version:
            return Choice(model, path, folder.versions, folder.older[:MAX_SPARES])
        await asyncio.to_thread(read_version, folder.path, version)
        return Choice(model, path, [version])

    async def check(self, may_be_broken: bool) -> None:
        """Raise ConfigError if the repository cannot be read or, unless `may_be_broken`, has no readable model."""
        paths, errors = await self._list_folders(), []
        for path in paths:
            try:
                await asyncio.to_thread(read_model_folder, path)
            except ConfigError as error:
                errors.append(error)
        if errors and len(errors) == len(paths) and not may_be_broken:
            problems = "\n".join(error.message for error in errors)
            advice = "start with --watch to deploy each model when its folder is correct"
            raise ConfigError(f"no model can be served:\n{problems}\ncorrect these, or {advice}", **errors[0].fields)

    async def scan(self) -> dict[str, FolderState]:
        """Return the current state of each model's folder, for `FolderChanges`."""
        return {path.name: await asyncio.to_thread(folder_state, path) for path in await self._list_folders()}

    async def plan_deployments(
        self, deployment: Deployment, is_governed: Callable[[str], bool], may_remove: bool
    ) -> list[list[Write]]:
        """Return the writes that deploy new and changed folders, one list per commit; unloaded models stay unloaded.

        A model whose folder cannot be read is deployed too, so that it is listed as failed, with the reason.
        `may_remove` must be False if other managers may have folders that this manager lacks.
        """
        changes, paths = [], await self._list_folders()
        if may_remove:
            changes.append(await self._plan_removals(deployment, {path.name for path in paths}))
        for path in paths:
            record = await asyncio.to_thread(_read_record, path)
            if record is None or not self._may_deploy(path.name, is_governed):
                continue
            if self._state.folders.get(path.name) != record or not self._state.list_model_blocks(path.name):
                changes.append(deployment.deploy_folder(path.name, record))
                log.info("model_registered", model=path.name, versions=list(record.versions))
        return _join_changes(changes)

    async def plan_model_deployment(
        self,
        deployment: Deployment,
        model: str,
        kept_versions: Collection[str],
        is_governed: Callable[[str], bool],
        may_remove: bool,
    ) -> list[Write]:
        """Return the writes that deploy a changed folder; versions in `kept_versions` are not loaded again."""
        paths = {path.name: path for path in await self._list_folders()}
        if model not in paths:
            return await self._plan_removals(deployment, paths.keys()) if may_remove else []
        record = await asyncio.to_thread(_read_record, paths[model])
        if record is None or not self._may_deploy(model, is_governed):
            return []
        if self._state.folders.get(model) == record and set(record.versions) <= set(kept_versions):
            return []
        log.info("model_folder_changed", model=model, versions=list(record.versions))
        return deployment.deploy_folder(model, record, kept_versions)

    def _may_deploy(self, model: str, is_governed: Callable[[str], bool]) -> bool:
        if is_governed(model):
            log.info("model_left_to_rollout", model=model)
        elif self._state.is_unloaded(model):
            log.info("model_left_unloaded", model=model)
        else:
            return True
        return False

    async def _plan_removals(self, deployment: Deployment, present: Collection[str]) -> list[Write]:
        if self._folder is None:
            return []
        return deployment.remove_folders(str(await asyncio.to_thread(self._folder.resolve)), present)

    async def _list_folders(self) -> list[Path]:
        return [] if self._folder is None else await asyncio.to_thread(list_model_folders, self._folder)


def make_folder_record(folder: ModelFolder) -> FolderRecord:
    return FolderRecord(source=str(folder.path.resolve()), versions=folder.versions, older=folder.older[:MAX_SPARES])


def _read_record(path: Path) -> FolderRecord | None:
    """Return the record of a model's folder; None if the folder's name is not a valid model name.

    A folder that cannot be read gets a record, too, so that a worker reports the model as failed.
    """
    try:
        return make_folder_record(read_model_folder(path))
    except ConfigError as error:
        log.error("reading_model_failed", model=path.name, error=error.message)
        if not NAME.match(path.name):
            return None
        return FolderRecord(source=str(path.resolve()), versions=find_wanted_versions(path))


def _join_changes(changes: list[list[Write]]) -> list[list[Write]]:
    """Join the lists of writes into as few commits as possible. No list is split: a model is deployed as a whole."""
    joined: list[list[Write]] = [[]]
    for change in changes:
        if joined[-1] and len(joined[-1]) + len(change) > MAX_WRITES:
            joined.append([])
        joined[-1] += change
    return joined
