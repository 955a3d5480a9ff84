"""What the edges tell of the server beside inference: metadata, readiness, statistics, the repository."""

import asyncio
from dataclasses import asdict
from importlib.metadata import version

from penstock.core.blocks import BlockDescription
from penstock.core.cluster import BlockView, Control
from penstock.core.errors import InvalidRequest, ModelNotReady, UnknownModel
from penstock.core.settings import Routing
from penstock.core.statistics import BlockStatistics
from penstock.router.dispatcher import Dispatcher
from penstock.router.slots import SlotStanding
from penstock.serving.admission import Admission
from penstock.serving.resolve import Resolver

SERVER_NAME = "penstock"
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
    "system_shared_memory",
)
LOOK_S = 0.02


class Catalogue:
    def __init__(self, admission: Admission, resolver: Resolver, dispatcher: Dispatcher, control: Control) -> None:
        self._admission = admission
        self._resolver = resolver
        self._dispatcher = dispatcher
        self._control = control

    @property
    def server_version(self) -> str:
        return version("penstock-serve")

    def is_server_ready(self) -> bool:
        return not self._admission.is_draining and self._resolver.is_server_ready()

    def is_model_ready(self, model: str, version: str) -> bool:
        """Raises for a model that does not exist."""
        if self._resolver.is_ready(model, version):
            return True
        if not any(view.model == model and version in ("", view.version) for view in self._resolver.views()):
            self._resolver.resolve(model, version)
        return False

    def known(self, model: str, version: str) -> BlockDescription:
        """What is known of a block now, perhaps without its inputs and outputs."""
        return self._resolver.resolve(model, version)

    def described(self, model: str, version: str) -> BlockDescription:
        """A block with its inputs and outputs; one that no worker has had in memory is told to load and refused."""
        block = self._resolver.resolve(model, version)
        if not block.is_described:
            self._dispatcher.wake(block.block_id)
            raise ModelNotReady(f"model '{model}' is being loaded; send the request again")
        return block

    async def block(self, model: str, version: str) -> BlockDescription:
        """A block with its inputs and outputs; waits while one that no worker has had in memory is loaded."""
        block = self._resolver.resolve(model, version)
        if block.is_described:
            return block
        self._dispatcher.wake(block.block_id)
        end = asyncio.get_running_loop().time() + block.settings.residence.max_waiting_s
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(LOOK_S)
            block = self._resolver.resolve(model, version)
            if block.is_described:
                return block
        raise ModelNotReady(f"model '{model}' was not loaded within residence.max_waiting_s; try again")

    def versions(self, model: str) -> list[str]:
        return self._resolver.versions(model)

    def blocks(self) -> list[BlockDescription]:
        return self._resolver.blocks()

    def index(self) -> list[BlockView]:
        return self._resolver.views()

    async def statistics(self, model: str, version: str) -> list[BlockStatistics]:
        """The statistics of one model, or of all where no name is given."""
        if model:
            self._resolver.resolve(model, version)
        return [
            found
            for found in await self._dispatcher.statistics()
            if model in ("", found.model) and version in ("", found.version)
        ]

    async def load(self, model: str) -> None:
        await self._control.load(model)

    async def unload(self, model: str) -> None:
        await self._control.unload(model)

    # --- routing

    def routing(self, model: str, key: str = "") -> dict[str, object]:
        """How requests find their worker, how the workers stand, and which one a key belongs to."""
        blocks = [block for block in self._resolver.blocks() if block.model == model]
        if not blocks:
            self._resolver.resolve(model, "")  # raises what is the matter
        routing = self._dispatcher.routing(blocks[-1])
        if key and routing.policy != "hash":
            raise InvalidRequest(f"model '{model}' is routed by {routing.policy}: only 'hash' gives a key its worker")
        return {
            "model": model,
            "routing": routing.model_dump(),
            "is_override": routing != blocks[-1].settings.routing,
            "blocks": [self._block_routing(block, key) for block in blocks],
        }

    def _block_routing(self, block: BlockDescription, key: str) -> dict[str, object]:
        found: dict[str, object] = {
            "block_id": block.block_id,
            "version": block.version,
            "workers": [_standing(found) for found in self._dispatcher.standing(block.block_id)],
        }
        if key:
            owner = self._dispatcher.owner(block.block_id, key)
            found["owner"] = owner.worker_id if owner else None
        return found

    async def set_routing(self, model: str, routing: Routing | None) -> None:
        """Routes a model's requests so on every gateway and over restarts; None: as its model.yaml says."""
        if not any(view.model == model for view in self._resolver.views()):
            raise UnknownModel(f"unknown model '{model}'")
        await self._control.set_routing(model, "" if routing is None else routing.model_dump_json())

    def status(self) -> dict[str, object]:
        """What runs, where, and how much waits, for people to read."""
        return {
            "server": SERVER_NAME,
            "version": self.server_version,
            "ready": self.is_server_ready(),
            "draining": self._admission.is_draining,
            "inflight_requests": self._admission.inflight_requests,
            "inflight_bytes": self._admission.inflight_bytes,
            "workers": [
                {
                    "id": worker.worker_id,
                    "pid": worker.pid,
                    "jobs": worker.jobs,
                    "memory_bytes": worker.memory_bytes,
                    "blocks": sorted(worker.blocks),
                    "dormant": sorted(worker.dormant),
                    "zone": worker.zone,
                }
                for worker in self._dispatcher.workers()
            ],
            "blocks": [
                {
                    "block_id": view.block_id,
                    "model": view.model,
                    "version": view.version,
                    "state": view.state,
                    "reason": view.reason,
                }
                for view in self._resolver.views()
            ],
            "queues": {
                block_id: {"waiting": waiting, "running": running}
                for block_id, (waiting, running) in self._dispatcher.queue_lengths().items()
            },
        }


def _standing(found: SlotStanding) -> dict[str, object]:
    shown = asdict(found)
    del shown["worker"]  # its identity on the lane; people know it by its name
    return shown
