"""What the edges tell of the server beside inference: metadata, readiness, statistics, the repository."""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version

from penstock.core.blocks import SERVABLE, BlockDescription, Control
from penstock.core.cluster.devices import gather
from penstock.core.error_text import for_clients
from penstock.core.errors import InvalidRequest, ModelNotReady, UnknownModel
from penstock.core.principals import Principal
from penstock.core.settings import GENERATE, Routing
from penstock.core.statistics import BlockStatistics
from penstock.gateway.grpc.choice import GrpcChoice
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.lane import Member
from penstock.serving.admission import Admission
from penstock.serving.readiness import Readiness
from penstock.serving.resolve import Resolver
from penstock.telemetry.live_view import BlockStanding, Standing, WorkerStanding

SERVER_NAME = "penstock"
EXTENSIONS = (
    "binary_tensor_data",
    "generate",
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
SEEN_S = 2.0


class Catalogue:
    def __init__(
        self, admission: Admission, resolver: Resolver, dispatcher: Dispatcher, control: Control | None
    ) -> None:
        self.resolver = resolver
        self._control = control
        self._admission = admission
        self._dispatcher = dispatcher
        self._readiness = Readiness()
        self.grpc_server = GrpcChoice("", "")  # of the clients' door

    @property
    def server_version(self) -> str:
        return version("penstock-serve")

    def look(self, now: float) -> None:
        """Sees which blocks are stuck: call it some times a second."""
        resident = {block_id for worker in self._dispatcher.workers() for block_id in worker.resident()}
        activities = self._dispatcher.activities()
        seen = {block_id: activities[block_id] for block_id in resident & activities.keys()}
        for block_id in self._readiness.look(seen, now):
            self._dispatcher.probe(block_id)

    def unreadiness(self) -> str:
        """Why no requests should be sent here; empty: they should."""
        if self._admission.is_draining:
            return "it is shutting down"
        if not self.resolver.has_heard:
            return "it does not know yet what there is to serve"
        return self._readiness.problem(self.resolver.views(), self.resolver.held)

    def is_server_ready(self) -> bool:
        return not self.unreadiness()

    def is_model_ready(self, model: str, version: str, principal: Principal) -> bool:
        """Raises for a model that does not exist."""
        if self.resolver.is_ready(model, version):
            return not self._readiness.is_stuck(self.resolver.resolve(model, version, principal).block_id)
        if not any(view.model == model and version in ("", view.version) for view in self.resolver.views(principal)):
            self.resolver.resolve(model, version, principal)
        return False

    def described(self, model: str, version: str, principal: Principal) -> BlockDescription:
        """A block with its inputs and outputs; one that no worker has had in memory is told to load and refused."""
        block = self.resolver.resolve(model, version, principal)
        if not block.is_described:
            self._dispatcher.wake(block.block_id)
            raise ModelNotReady(f"model '{model}' is being loaded; send the request again")
        return block

    async def block(self, model: str, version: str, principal: Principal) -> BlockDescription:
        """A block with its inputs and outputs; waits while one that no worker has had in memory is loaded."""
        block = self.resolver.resolve(model, version, principal)
        if block.is_described:
            return block
        self._dispatcher.wake(block.block_id)
        end = asyncio.get_running_loop().time() + block.settings.residence.max_waiting_s
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(LOOK_S)
            block = self.resolver.resolve(model, version, principal)
            if block.is_described:
                return block
        raise ModelNotReady(f"model '{model}' was not loaded within residence.max_waiting_s; try again")

    async def statistics(self, model: str, version: str, principal: Principal) -> list[BlockStatistics]:
        """The statistics of one model, or of all where no name is given."""
        if model:
            self.resolver.resolve(model, version, principal)
        return [
            found
            for found in await self._dispatcher.statistics()
            if model in ("", found.model)
            and version in ("", found.version)
            and principal.may_ask(found.model, found.block_id)
        ]

    async def generation(self) -> dict[str, dict[str, int]]:
        """How the engines of blocks that generate text stand, by block; asked from the workers where there are any."""
        if not any(block.settings.task == GENERATE for block in self.resolver.blocks()):
            return {}
        found = await self._dispatcher.statistics()
        return {each.block_id: asdict(each.generation) for each in found if each.generation is not None}

    # --- the repository

    async def load(self, model: str, principal: Principal) -> None:
        self._check_change(model, principal)
        await self._changes().load(model, principal.name)
        await self._see(model, is_ready=True)

    async def unload(self, model: str, principal: Principal) -> None:
        self._check_change(model, principal)
        await self._changes().unload(model, principal.name)
        await self._see(model, is_ready=False)

    async def _see(self, model: str, is_ready: bool) -> None:
        """What the manager has done shows here a moment later, and who asked for it may look at once."""
        end = asyncio.get_running_loop().time() + SEEN_S
        while asyncio.get_running_loop().time() < end:
            if self._is_shown_ready(model) == is_ready:
                return
            await asyncio.sleep(LOOK_S)

    def _is_shown_ready(self, model: str) -> bool:
        is_servable = any(view.model == model and view.state in SERVABLE for view in self.resolver.views())
        return is_servable and self.resolver.is_ready(model)

    def _changes(self) -> Control:
        if self._control is None:
            raise InvalidRequest("this is a worker's own door, for inference: ask a gateway")
        return self._control

    def _check_change(self, model: str, principal: Principal) -> None:
        """What it may not ask is to it as if it were not there."""
        if not self.resolver.may_change(principal, model):
            raise UnknownModel(f"the repository has no model '{model}'")

    # --- routing

    def routing(self, model: str, principal: Principal, key: str = "") -> dict[str, object]:
        """How requests find their worker, how the workers stand, and which one a key belongs to."""
        blocks = [block for block in self.resolver.blocks(principal) if block.model == model]
        if not blocks:
            self.resolver.resolve(model, "", principal)  # raises what is the matter
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
            "workers": [
                {name: value for name, value in asdict(standing).items() if name != "worker"}  # its lane's name for it
                for standing in self._dispatcher.standing(block.block_id)
            ],
        }
        if key:
            owner = self._dispatcher.owner(block.block_id, key)
            found["owner"] = owner.worker_id if owner else None
        return found

    async def set_routing(self, model: str, routing: Routing | None, principal: Principal) -> None:
        """Routes a model's requests so on every gateway and over restarts; None: as its model.yaml says."""
        is_known = any(view.model == model for view in self.resolver.views())
        if not is_known or not self.resolver.may_change(principal, model):
            raise UnknownModel(f"unknown model '{model}'")
        given = "" if routing is None else routing.model_dump_json()
        await self._changes().set_routing(model, given, principal.name)

    def standing(self) -> Standing:
        """What runs, and where."""
        max_rows = {
            block.block_id: block.settings.batching.max_rows for block in self.resolver.blocks() if block.max_batch_size
        }
        workers = list(self._dispatcher.workers())
        return Standing(
            server=SERVER_NAME,
            version=self.server_version,
            ready=self.is_server_ready(),
            draining=self._admission.is_draining,
            blocks=[
                BlockStanding(v.block_id, v.model, v.version, v.state, for_clients(v.reason), max_rows.get(v.block_id))
                for v in self.resolver.views()
            ],
            workers=[
                WorkerStanding(
                    w.worker_id,
                    w.pid,
                    w.jobs,
                    w.memory_bytes,
                    sorted(w.blocks),
                    sorted(w.dormant),
                    w.zone,
                    [*w.devices],
                )
                for w in workers
            ],
            devices=gather((w.worker_id, device) for w in workers for device in w.devices),
        )

    def status(self) -> dict[str, object]:
        """What runs, where, and how much waits, for people to read."""
        shown = asdict(self.standing())
        described = {block.block_id: block for block in self.resolver.blocks() if block.is_described}
        for block in shown["blocks"]:
            del block["max_rows"]  # its configuration shows it
            block |= running(described.get(block["block_id"]), self._dispatcher.workers())
        return {
            **shown,
            "grpc_server": self.grpc_server._asdict(),
            "inflight_requests": self._admission.inflight_requests,
            "inflight_bytes": self._admission.inflight_bytes,
            "queues": {
                block_id: {"waiting": waiting, "running": running}
                for block_id, (waiting, running) in self._dispatcher.queue_lengths().items()
            },
        }


def running(block: BlockDescription | None, workers: Iterable[Member]) -> dict[str, str]:
    """What runs a block that was loaded, and how it came to that; nothing where none was."""
    if block is None:
        return {}
    # Machines of different kinds may run it in different ways: of each way, one worker stands for all.
    ways: dict[tuple[str, str, str], str] = {}
    for worker in workers:
        each = worker.blocks.get(block.block_id)
        if each is not None and each.is_described:
            way = (each.platform, each.precision, each.device)
            ways.setdefault(way, f"{' '.join(way)} on {worker.worker_id}{each.note and f': {each.note}'}")
    return {
        "platform": block.platform,
        "precision": block.precision,
        "device": block.device,
        "note": for_clients("; ".join(ways.values()) if len(ways) > 1 else block.note),
    }
