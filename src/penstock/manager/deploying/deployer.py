"""Deploys, loads, unloads and routes models, for operators and for the manager's features."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from penstock.core.error_text import describe_first_problem
from penstock.core.errors import InvalidRequest, ModelNotReady, UnknownModel
from penstock.core.settings import Routing
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deploying.deployment import Choice, Deployment
from penstock.manager.deploying.folder_changes import FolderChanges
from penstock.manager.deploying.repository import Repository, make_folder_record
from penstock.manager.desired_state import BLOCKS, ROUTING
from penstock.manager.publishing.etags import require_etag
from penstock.manager.term import EventDraft
from penstock.storage.metadata.metadata_store import Compare, Write

log = structlog.get_logger()
VERSION = re.compile(r"[0-9]{1,18}")
UNLOAD_S = 30.0
REPLACED_S = 2.0  # how long a load waits until the replaced blocks are unloaded, which may take longer
LOAD_S = 300.0  # timeout for models that have no folder here, and so no `timeouts.load_s`
FindVersion = Callable[[str], Awaitable[Choice]]


class Deployer:
    """Changes which versions of models the workers should hold. Used from the manager's event loop."""

    def __init__(
        self,
        control: ControlPlane,
        folder: Path | None = None,
        find_version: FindVersion | None = None,
        is_watching: bool = False,
    ) -> None:
        """`folder` is the model repository; `find_version` finds uploaded models: NAME, NAME:VERSION or NAME@ALIAS.

        If `is_watching`, the caller calls `deploy_changes` regularly.
        """
        self._control = control
        self.is_watching = is_watching and folder is not None
        self._changes = FolderChanges({})
        self._repository = Repository(folder, control.desired)
        self._find_version = find_version
        self._deploying = asyncio.Lock()  # so that the folder that was read last is also deployed last

    async def check_repository(self) -> None:
        """Raise ConfigError if the repository cannot be read or, unless watched, contains no readable model."""
        await self._repository.check(may_be_broken=self.is_watching)

    async def deploy_repository(self, is_governed: Callable[[str], bool], may_remove: bool) -> None:
        """Deploy new and changed model folders.

        `is_governed` returns whether a feature, such as a rollout, chooses a model's versions.
        """
        async with self._deploying:
            if self.is_watching:
                self._changes = FolderChanges(await self._repository.scan())
            for writes in await self._repository.plan_deployments(self._create_deployment(), is_governed, may_remove):
                await self._control.commit(writes)

    async def deploy_changes(self, is_governed: Callable[[str], bool], may_remove: bool, now: float) -> None:
        """Deploy the model folders that changed and have not changed again for a while."""
        found = await self._repository.scan()
        for model in self._changes.take_steady_models(found, now):
            async with self._deploying:
                kept = self._changes.find_unchanged_versions(model, found)
                plan = self._repository.plan_model_deployment(
                    self._create_deployment(), model, kept, is_governed, may_remove
                )
                if writes := await plan:
                    await self._control.commit(writes)
            self._changes.set_deployed(model, found)

    async def load(self, model: str) -> None:
        """Deploy the model again from its folder, and return when every worker has loaded it.

        The earlier blocks keep serving until every worker has loaded the model, and also if loading fails.
        """
        load_s = await self._deploy(model)
        try:
            await self.wait_loaded(model, load_s)
        except ModelNotReady as error:
            self._control.events.emit("model_not_loaded", model, error.message)
            raise
        self._control.events.emit("model_loaded", model, "model loaded")

    async def wait_loaded(self, model: str, timeout_s: float) -> None:
        """Return when each worker that should hold the model has loaded it; raise if a worker fails to load it."""
        table = self._control.term.blocks
        if not await self._control.wait_for(lambda: table.has_load_ended(model), timeout_s):
            self._check_same_term(table)
            wanted = [block for block in table.list_model_blocks(model) if block.is_wanted]
            hints = "".join(
                f"; no worker can hold version {block.version}: see 'penstock block explain {block.block_id}'"
                for block in wanted
                if table.list_workers() and not table.find_target_workers(block)
            )
            versions = ", ".join(block.version for block in wanted)
            raise ModelNotReady(
                f"model '{model}' version {versions} is not loaded on every worker after {timeout_s} s{hints}"
            )
        if failure := table.describe_failure(model):
            raise ModelNotReady(f"model '{model}' {failure}")
        await self._control.wait_for(lambda: table.has_unloaded_unwanted(model), REPLACED_S)

    async def unload(self, model: str, *further_events: EventDraft, compares: Sequence[Compare] = ()) -> None:
        """Unload the model. It stays unloaded, also after restarts, until an operator loads it again.

        `further_events` are recorded with the change, and `compares` are conditions of the write.
        """
        async with self._deploying:
            self._check_known(model)
            unloaded = EventDraft("model_unloaded", model, "model unloaded; it stays unloaded until it is loaded again")
            await self._control.events.commit(
                self._create_deployment().unload(model), [unloaded, *further_events], compares
            )
        table = self._control.term.blocks
        if not await self._control.wait_for(lambda: table.has_unloaded_unwanted(model), UNLOAD_S):
            self._check_same_term(table)
            raise ModelNotReady(
                f"model '{model}' accepts no more requests, but a worker still runs it after {UNLOAD_S} s"
            )

    async def set_routing(self, model: str, routing_json: str) -> None:
        self._check_known(model)
        if routing_json:
            try:
                routing_json = Routing.model_validate_json(routing_json).model_dump_json()
            except ValidationError as error:
                raise InvalidRequest(f"{describe_first_problem(error, 'routing')}; see docs/routing.md") from error
        await self._control.commit([Write(ROUTING + model, routing_json.encode() or None)])
        log.info("routing_set", model=model, routing=routing_json or "from model.yaml")

    async def choose(self, model: str, version: str = "", source: str = "") -> Choice:
        """Find a model by its name in the repository, else among the uploaded models."""
        if version and not VERSION.fullmatch(version):
            raise UnknownModel(f"model '{model}' has no version '{version[:32]}': versions are numbers")
        if not source and (found := await self._repository.choose(model, version)):
            return found
        if self._find_version is None:
            raise _make_unknown_model_error(model)
        return await self._find_version(f"{model}:{version}" if version else model)

    async def deploy(
        self, choice: Choice, plan_more_writes: Callable[[list[str]], Sequence[Write]] = lambda block_ids: ()
    ) -> list[str]:
        """Record that the workers should hold the chosen versions; return the ids of these versions' blocks.

        `plan_more_writes` gets the ids and returns further writes for the same commit.
        """
        async with self._deploying:
            writes = self._create_deployment().deploy(choice)
            block_ids = [write.key.removeprefix(BLOCKS) for write in writes[: len(choice.versions)]]
            text = f"model '{choice.model}' deployed from {choice.source}"
            drafts = [EventDraft("block_deployed", block_id, text) for block_id in block_ids]
            await self._control.events.commit([*writes, *plan_more_writes(block_ids)], drafts, choice.compares)
        found = [self._control.desired.find_block(choice.model, version) for version in choice.versions]
        return [block.block_id for block in found if block is not None]

    async def change_block(self, block_id: str, *drafts: EventDraft, expected: str = "", **fields: Any) -> None:
        """Change fields of a block's record without loading the block again.

        `drafts` are events that are recorded with the change. If `expected` is set, the block's ETag must match it.
        """
        async with self._deploying:
            desired = self._control.desired
            block = desired.blocks.get(block_id)
            if block is None:
                raise UnknownModel(f"there is no block '{block_id}': 'penstock block list' shows all blocks")
            with require_etag(expected, BLOCKS + block_id, desired.revisions) as compares:
                await self._control.events.commit([self._create_deployment().change(block, **fields)], drafts, compares)

    def _create_deployment(self) -> Deployment:
        table = self._control.term.blocks
        return Deployment(self._control.desired, table, lambda: f"blk-{secrets.token_hex(6)}")

    async def _deploy(self, model: str) -> float:
        """Write the deployment of a model; return the seconds that workers get to load the model."""
        async with self._deploying:
            self._control.check_leads()
            folder = await self._repository.find(model)
            if folder is not None:
                await self._control.commit(self._create_deployment().deploy_folder(model, make_folder_record(folder)))
                log.info("model_registered", model=model, versions=list(folder.versions))
                return folder.settings.timeouts.load_s
            self._check_known(model)
            await self._control.commit(self._create_deployment().reload(model))
            return LOAD_S

    def _check_known(self, model: str) -> None:
        self._control.check_leads()
        if not self._control.desired.list_model_blocks(model):
            raise _make_unknown_model_error(model)

    def _check_same_term(self, table: object) -> None:
        if self._control.term.blocks is not table:
            raise self._control.election.make_not_leading_error()


def _make_unknown_model_error(model: str) -> UnknownModel:
    return UnknownModel(f"the repository has no model '{model}'")
