"""Answers to requests other than inference, for all protocols: metadata, readiness, statistics, routing, repository."""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from typing import Protocol

from penstock.core.blocks import SERVABLE, BlockDescription, Control
from penstock.core.cluster.devices import merge_devices
from penstock.core.config import SERVER_NAME
from penstock.core.error_text import clean_for_clients
from penstock.core.errors import InvalidRequest, ModelNotReady, OtherCluster, UnknownModel
from penstock.core.principals import Principal
from penstock.core.settings import GENERATE, Routing
from penstock.core.statistics import BlockStatistics
from penstock.features.live.live_view import BlockInfo, ServerInfo, WorkerInfo
from penstock.gateway.native_grpc.server_choice import GrpcChoice
from penstock.router.dispatcher import Dispatcher
from penstock.router.lanes.lane import ConnectedWorker
from penstock.serving.admission import Admission
from penstock.serving.readiness import Readiness
from penstock.serving.resolve import Resolver
from penstock.telemetry.background import describe_failing_loop

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
POLL_S = 0.02
CHANGE_TIMEOUT_S = 2.0  # for a change by the manager to arrive here


class OtherClusters(Protocol):
    """Finds blocks of other clusters that a directory lists."""

    def find_refusal(self, block_id: str, principal: Principal) -> OtherCluster | None:
        """Return the error for a request that names a block of another cluster, or None if no cluster has the block."""


class Catalogue:
    def __init__(
        self,
        admission: Admission,
        resolver: Resolver,
        dispatcher: Dispatcher,
        control: Control | None,
        other_clusters: OtherClusters | None = None,
    ) -> None:
        """Create the catalogue. Without `other_clusters`, this server uses no directory of other clusters."""
        self.resolver = resolver
        self._other_clusters = other_clusters
        self._control = control
        self._admission = admission
        self._dispatcher = dispatcher
        self._readiness = Readiness()
        # Set once the endpoint for clients is open.
        self.grpc_server = GrpcChoice("", "")
        self.grpc_port = 0

    @property
    def server_version(self) -> str:
        return version("penstock-serve")

    def find_stuck_blocks(self, now: float) -> None:
        """Probe blocks that may be stuck. Call this several times per second."""
        resident = {block_id for worker in self._dispatcher.list_workers() for block_id in worker.list_loaded_blocks()}
        activities = self._dispatcher.describe_activities()
        seen = {block_id: activities[block_id] for block_id in resident & activities.keys()}
        for block_id in self._readiness.update(seen, now):
            self._dispatcher.probe(block_id)

    def explain_unreadiness(self) -> str:
        """Return why the server is not ready, or an empty string."""
        if self._admission.is_draining:
            return "it is shutting down"
        if not self.resolver.has_cluster_state:
            return "it has not received its models from the manager yet"
        problem = self._readiness.find_problem(self.resolver.list_views(), self.resolver.held_block_ids)
        return problem or describe_failing_loop()

    def is_server_ready(self) -> bool:
        return not self.explain_unreadiness()

    def is_model_ready(self, model: str, version: str, principal: Principal) -> bool:
        """Return whether the model is ready; raise UnknownModel if it does not exist."""
        if self.resolver.is_ready(model, version):
            return not self._readiness.is_stuck(self.resolver.resolve(model, version, principal).block_id)
        if not any(
            view.model == model and version in ("", view.version) for view in self.resolver.list_views(principal)
        ):
            self.resolver.resolve(model, version, principal)
        return False

    def get_described_block(self, model: str, version: str, principal: Principal) -> BlockDescription:
        """Return a block with its inputs and outputs. If it was never loaded, start loading and raise ModelNotReady."""
        block = self.resolver.resolve(model, version, principal)
        if not block.is_described:
            self._dispatcher.wake(block.block_id)
            raise ModelNotReady(f"model '{model}' is being loaded; send the request again")
        return block

    async def wait_for_block(self, model: str, version: str, principal: Principal) -> BlockDescription:
        """Return a block with its inputs and outputs. If it was never loaded, wait until it is loaded."""
        try:
            block = self.resolver.resolve(model, version, principal)
        except UnknownModel:
            if (
                self._other_clusters is not None
                and (refusal := self._other_clusters.find_refusal(model, principal)) is not None
            ):
                raise refusal from None
            raise
        if block.is_described:
            return block
        self._dispatcher.wake(block.block_id)
        end = asyncio.get_running_loop().time() + block.settings.residence.max_waiting_s
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL_S)
            block = self.resolver.resolve(model, version, principal)
            if block.is_described:
                return block
        raise ModelNotReady(f"model '{model}' was not loaded within residence.max_waiting_s; try again")

    async def collect_statistics(self, model: str, version: str, principal: Principal) -> list[BlockStatistics]:
        """Return the statistics of one model, or of all models for an empty name."""
        if model:
            self.resolver.resolve(model, version, principal)
        return [
            found
            for found in await self._dispatcher.collect_statistics()
            if model in ("", found.model)
            and version in ("", found.version)
            and principal.may_use(found.model, found.block_id)
        ]

    async def collect_generation_counts(self) -> dict[str, dict[str, int]]:
        """Return the counts of generating engines by block. The workers are asked only if a block generates text."""
        if not any(block.settings.task == GENERATE for block in self.resolver.list_blocks()):
            return {}
        found = await self._dispatcher.collect_statistics()
        return {each.block_id: asdict(each.generation) for each in found if each.generation is not None}

    # --- the repository

    async def load(self, model: str, principal: Principal) -> None:
        self._check_change(model, principal)
        await self._require_control().load(model, principal.name)
        await self._wait_until(model, is_ready=True)

    async def unload(self, model: str, principal: Principal) -> None:
        self._check_change(model, principal)
        await self._require_control().unload(model, principal.name)
        await self._wait_until(model, is_ready=False)

    async def _wait_until(self, model: str, is_ready: bool) -> None:
        """Wait until this gateway lists the model as ready or not, because the caller may check the state at once."""
        end = asyncio.get_running_loop().time() + CHANGE_TIMEOUT_S
        while asyncio.get_running_loop().time() < end:
            if self._is_listed_ready(model) == is_ready:
                return
            await asyncio.sleep(POLL_S)

    def _is_listed_ready(self, model: str) -> bool:
        is_servable = any(view.model == model and view.state in SERVABLE for view in self.resolver.list_views())
        return is_servable and self.resolver.is_ready(model)

    def _require_control(self) -> Control:
        if self._control is None:
            raise InvalidRequest("this is a worker's direct endpoint, which serves inference only: use a gateway")
        return self._control

    def _check_change(self, model: str, principal: Principal) -> None:
        """Raise UnknownModel if the caller may not change the model, as if the model did not exist."""
        if not self.resolver.may_change(principal, model):
            raise UnknownModel(f"the repository has no model '{model}'")

    # --- routing

    def describe_model_routing(self, model: str, principal: Principal, key: str = "") -> dict[str, object]:
        """Return a model's routing, the state of its workers, and the worker of `key`."""
        blocks = [block for block in self.resolver.list_blocks(principal) if block.model == model]
        if not blocks:
            self.resolver.resolve(model, "", principal)  # raises UnknownModel or another error
        routing = self._dispatcher.get_routing(blocks[-1])
        if key and routing.policy != "hash":
            raise InvalidRequest(
                f"model '{model}' has the routing policy '{routing.policy}': 'key' is only for the policy 'hash'"
            )
        return {
            "model": model,
            "routing": routing.model_dump(),
            "is_override": routing != blocks[-1].settings.routing,
            "blocks": [self._describe_routing(block, key) for block in blocks],
        }

    def _describe_routing(self, block: BlockDescription, key: str) -> dict[str, object]:
        found: dict[str, object] = {
            "block_id": block.block_id,
            "version": block.version,
            "workers": [
                {name: value for name, value in asdict(slot).items() if name != "worker"}  # the lane's internal name
                for slot in self._dispatcher.list_slot_states(block.block_id)
            ],
        }
        if key:
            owner = self._dispatcher.find_owner(block.block_id, key)
            found["owner"] = owner.worker_id if owner else None
        return found

    async def set_routing(self, model: str, routing: Routing | None, principal: Principal) -> None:
        """Override a model's routing on every gateway; None removes the override."""
        is_known = any(view.model == model for view in self.resolver.list_views())
        if not is_known or not self.resolver.may_change(principal, model):
            raise UnknownModel(f"unknown model '{model}'")
        given = "" if routing is None else routing.model_dump_json()
        await self._require_control().set_routing(model, given, principal.name)

    def describe_server(self) -> ServerInfo:
        """Return the server's blocks, workers and devices."""
        max_rows = {
            block.block_id: block.settings.batching.max_rows
            for block in self.resolver.list_blocks()
            if block.max_batch_size
        }
        workers = list(self._dispatcher.list_workers())
        return ServerInfo(
            server=SERVER_NAME,
            version=self.server_version,
            ready=self.is_server_ready(),
            draining=self._admission.is_draining,
            blocks=[
                BlockInfo(
                    v.block_id, v.model, v.version, v.state, clean_for_clients(v.reason), max_rows.get(v.block_id)
                )
                for v in self.resolver.list_views()
            ],
            workers=[
                WorkerInfo(
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
            devices=merge_devices((w.worker_id, device) for w in workers for device in w.devices),
        )

    def describe_status(self) -> dict[str, object]:
        """Return the server's blocks, workers, devices and queues, for people to read."""
        found = asdict(self.describe_server())
        described = {block.block_id: block for block in self.resolver.list_blocks() if block.is_described}
        for block in found["blocks"]:
            del block["max_rows"]  # the model's configuration has it
            block |= describe_run(described.get(block["block_id"]), self._dispatcher.list_workers())
        return {
            **found,
            "grpc_server": self.grpc_server._asdict(),
            "inflight_requests": self._admission.inflight_requests,
            "inflight_bytes": self._admission.inflight_bytes,
            "queues": {
                block_id: {"waiting": waiting, "running": running}
                for block_id, (waiting, running) in self._dispatcher.count_jobs_by_block().items()
            },
        }


def describe_run(block: BlockDescription | None, workers: Iterable[ConnectedWorker]) -> dict[str, str]:
    """Return the platform, precision, device and notes of a block; an empty dict if the block was never loaded."""
    if block is None:
        return {}
    # Different machines may run the block in different variants; list one worker for each.
    variants: dict[tuple[str, str, str], str] = {}
    for worker in workers:
        each = worker.blocks.get(block.block_id)
        if each is not None and each.is_described:
            variant = (each.platform, each.precision, each.device)
            variants.setdefault(variant, f"{' '.join(variant)} on {worker.worker_id}{each.note and f': {each.note}'}")
    return {
        "platform": block.platform,
        "precision": block.precision,
        "device": block.device,
        "note": clean_for_clients("; ".join(variants.values()) if len(variants) > 1 else block.note),
    }
