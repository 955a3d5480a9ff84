"""The manager: deploys models as blocks, assigns them to workers, and tells gateways what there is."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog
from pydantic import ValidationError

from penstock.core.blocks import BlockView
from penstock.core.errors import InvalidRequest, ModelNotReady, UnknownModel
from penstock.core.settings import Routing
from penstock.manager.registry import Chosen, DeployedBlock, Registry, WorkerState
from penstock.models.folder import NAME, ModelFolder, list_model_folders, read_model_folder
from penstock.storage.metadata_sqlite import Metadata

log = structlog.get_logger()
UNLOAD_S = 30.0
GO_S = 2.0  # what a load waits for those that it replaced: they end what they run, however long that takes
MAX_SPARES = 3  # older versions that are tried where the latest does not load, and none serves


class Manager:
    """Used from one event loop; gateways ask it through its service, by wire/control.py."""

    def __init__(self, repository: Path, metadata: Metadata) -> None:
        self._repository = repository
        self._metadata = metadata
        self._registry = Registry()
        self._gateways: dict[str, str] = {}  # id to endpoint
        self._routings: dict[str, str] = {}  # by model, as JSON, what stands before its model.yaml
        self._changed = asyncio.Condition()
        self._deploying = asyncio.Lock()  # who reads a folder later deploys later
        self.revision = 0  # of everything that an assignment or a view shows

    async def deploy_all(self) -> None:
        """Deploys every model of the repository; a model.yaml with a fault refuses the start."""
        folders = [
            await asyncio.to_thread(read_model_folder, path)
            for path in await asyncio.to_thread(list_model_folders, self._repository)
        ]
        self._routings = await self._read_routings()
        for folder in folders:
            await self._deploy(folder)
        await self._notify()

    async def load(self, model: str) -> None:
        """Deploys the model anew from its folder; returns when every worker has it, or raises why not.

        What served before serves until then, and on where it fails.
        """
        folder = self._repository / model
        if not NAME.match(model) or not (folder / "model.yaml").is_file():
            raise UnknownModel(f"the repository has no model '{model}'")
        async with self._deploying:
            found = await asyncio.to_thread(read_model_folder, folder)
            await self._deploy(found)
            await self._notify()
        load_s = found.settings.timeouts.load_s
        if not await self._becomes(lambda: self._registry.has_answered(model), load_s):
            versions = ", ".join(found.versions)
            raise ModelNotReady(f"model '{model}' version {versions} is not on every worker after {load_s} s")
        if failure := self._registry.failure(model):
            raise ModelNotReady(f"model '{model}' {failure}")
        await self._becomes(lambda: self._registry.is_settled(model), GO_S)

    async def unload(self, model: str) -> None:
        if not self._registry.of_model(model):
            raise UnknownModel(f"the repository has no model '{model}'")
        self._registry.withdraw(model)
        await self._notify()
        if not await self._becomes(lambda: self._registry.is_settled(model), UNLOAD_S):
            raise ModelNotReady(f"model '{model}' takes no more requests, but some worker runs it after {UNLOAD_S} s")

    async def set_routing(self, model: str, routing_json: str) -> None:
        if not self._registry.of_model(model):
            raise UnknownModel(f"the repository has no model '{model}'")
        if routing_json:
            try:
                routing_json = Routing.model_validate_json(routing_json).model_dump_json()
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "routing"
                raise InvalidRequest(f"{where}: {first['msg']}; see docs/routing.md") from error
        await self._metadata.set_routing(model, routing_json)
        self._routings[model] = routing_json
        log.info("routing", model=model, routing=routing_json or "as model.yaml says")
        await self._notify()

    def view(self) -> list[BlockView]:
        return [
            BlockView(
                b.block_id, b.model, b.version, *b.state(), self._routings.get(b.model, ""), b.has_served, b.is_new
            )
            for b in self._registry.blocks()
        ]

    # --- for the service

    async def wait_change(self, seen: int) -> int:
        """Returns the revision as soon as it is not `seen`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.revision != seen)
            return self.revision

    def assigned(self) -> tuple[list[str], list[DeployedBlock]]:
        """The gateways' endpoints and the blocks; every worker holds every wanted block."""
        return sorted(self._gateways.values()), self._registry.assigned()

    async def gateway_joined(self, gateway_id: str, endpoint: str) -> None:
        self._gateways[gateway_id] = endpoint
        await self._notify()

    async def gateway_left(self, gateway_id: str) -> None:
        if self._gateways.pop(gateway_id, None) is not None:
            await self._notify()

    async def worker_reported(self, worker: str, states: Iterable[tuple[str, WorkerState]]) -> None:
        if self._registry.worker_reported(worker, states):
            await self._notify()

    async def worker_left(self, worker: str) -> None:
        self._registry.worker_left(worker)
        await self._notify()

    async def _deploy(self, folder: ModelFolder) -> None:
        versions = [*folder.versions, *folder.older[:MAX_SPARES]]
        blocks = [Chosen(version, await self._metadata.block_id(folder.name, version)) for version in versions]
        chosen = len(folder.versions)
        self._registry.deploy(folder.name, str(folder.path.resolve()), blocks[:chosen], blocks[chosen:])
        log.info("deployed", model=folder.name, versions=list(folder.versions))

    async def _read_routings(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for model, routing in (await self._metadata.routings()).items():
            try:
                found[model] = Routing.model_validate_json(routing).model_dump_json()
            except ValidationError:  # of another version of Penstock
                log.warning("routing_passed_over", model=model, routing=routing)
        return found

    async def _becomes(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until it is so, and returns whether it became so in time."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(is_so), timeout_s)
            except TimeoutError:
                return False
        return True

    async def _notify(self) -> None:
        async with self._changed:
            self.revision += 1
            self._changed.notify_all()
