"""The model registry of a manager: where its files are, its services, and what collects what nobody names."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack

import grpc
import structlog

from penstock.access.guard import Guard
from penstock.app.places import http_scheme
from penstock.app.ports import open_own_socket, open_usual
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.manager.models.registry import ModelRegistry
from penstock.manager.models.service import ModelRegistryService
from penstock.pb.v1 import registry_pb2_grpc
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.objects.base import open_objects
from penstock.wire.credentials.certificates import Certificates

log = structlog.get_logger()
USUAL_PORT = 7412


def open_registry(
    config: Config, store: MetadataStore, tell: Callable[[str, str, str], None], stack: AsyncExitStack
) -> ModelRegistry:
    objects = open_objects(config.registry.objects, config.data_dir / "objects", config.s3)
    registry = ModelRegistry(store, objects, config.data_dir / "uploads", config.registry, tell)
    collecting = asyncio.create_task(registry.collect_forever(), name="collect-models")
    stack.callback(collecting.cancel)
    return registry


def registry_service(registry: ModelRegistry) -> Callable[[grpc.aio.Server], None]:
    def add(server: grpc.aio.Server) -> None:
        registry_pb2_grpc.add_ModelRegistryServicer_to_server(ModelRegistryService(registry), server)

    return add


async def open_registry_door(
    config: Config, registry: ModelRegistry, guard: Guard, host: str, certificates: Certificates, stack: AsyncExitStack
) -> Address:
    """REST, on the manager's host."""
    # Only now: `penstock serve` on one machine has no such door.
    from penstock.gateway.http.doorman import Doorman, machine_names
    from penstock.gateway.http.registry import RegistryApp, serve_registry

    async def listen(port: int) -> socket.socket:
        return open_own_socket(host, port, "registry.http_port")

    opened = await open_usual(listen, config.registry.http_port, USUAL_PORT)
    doorman = Doorman(config.model_copy(update={"host": host}), guard, machine_names())
    stack.push_async_callback(serve_registry(RegistryApp(registry, doorman), opened, config.limits, certificates))
    address = Address(host, opened.getsockname()[1])
    log.info("registry_door", http=f"{http_scheme(config)}://{address}")
    return address
