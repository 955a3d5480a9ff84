"""What the edges tell of the server beside inference: metadata, readiness, statistics, the repository."""

from collections.abc import Sequence
from importlib.metadata import version

from penstock.core.blocks import BlockDescription
from penstock.core.cluster import BlockView, Control
from penstock.core.statistics import BlockStatistics
from penstock.router.dispatcher import Dispatcher
from penstock.serving.admission import Admission
from penstock.serving.resolve import Resolver

SERVER_NAME = "penstock"
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "statistics",
)


class Catalogue:
    def __init__(self, admission: Admission, resolver: Resolver, dispatcher: Dispatcher, control: Control) -> None:
        self._admission = admission
        self._resolver = resolver
        self._dispatcher = dispatcher
        self._control = control

    @property
    def server_version(self) -> str:
        return version("penstock")

    @property
    def extensions(self) -> Sequence[str]:
        return EXTENSIONS

    def is_server_ready(self) -> bool:
        return not self._admission.is_draining and self._resolver.is_server_ready()

    def is_model_ready(self, model: str, version: str) -> bool:
        """Raises for a model that does not exist."""
        if self._resolver.is_ready(model, version):
            return True
        if not any(view.model == model and version in ("", view.version) for view in self._resolver.views()):
            self._resolver.resolve(model, version)
        return False

    def block(self, model: str, version: str) -> BlockDescription:
        return self._resolver.resolve(model, version)

    def versions(self, model: str) -> list[str]:
        return self._resolver.versions(model)

    def blocks(self) -> list[BlockDescription]:
        return self._resolver.blocks()

    def index(self) -> list[BlockView]:
        return self._resolver.views()

    async def statistics(self, model: str, version: str) -> list[BlockStatistics]:
        """Of one model, or of all where no name is given."""
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

    def status(self) -> dict[str, object]:
        """For people: what runs, where, and how much waits."""
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
