"""The model registry of a manager: where its files are, its REST door, and what collects what nobody names."""

import asyncio
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager

import structlog
import uvicorn

from penstock.app.ports import open_own_socket
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.gateway.http.doorman import Doorman, machine_names
from penstock.gateway.http.registry import RegistryApp
from penstock.manager.models.registry import ModelRegistry
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.objects.base import open_objects

log = structlog.get_logger()
USUAL_PORT = 7412
MAX_CONNECTIONS = 256
CLOSE_S = 2


def open_registry(config: Config, store: MetadataStore, stack: AsyncExitStack) -> ModelRegistry:
    objects = open_objects(config.registry.objects, config.data_dir / "objects", config.s3)
    registry = ModelRegistry(store, objects, config.data_dir / "uploads", config.registry)
    collecting = asyncio.create_task(registry.collect_forever(), name="collect-models")
    stack.callback(collecting.cancel)
    return registry


async def open_registry_door(config: Config, registry: ModelRegistry, host: str, stack: AsyncExitStack) -> Address:
    """REST, on the manager's host; a usual port that is taken gives way to a free one."""
    wanted = config.registry.http_port
    try:
        opened = open_own_socket(host, USUAL_PORT if wanted is None else wanted, "registry.http_port")
    except ConfigError:
        if wanted is not None:
            raise
        opened = open_own_socket(host, 0, "registry.http_port")
    doorman = Doorman(config.model_copy(update={"host": host}), machine_names())
    server = _RegistryServer(
        uvicorn.Config(
            RegistryApp(registry, doorman),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_S,
            ws="none",
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[opened]), name="registry-door")

    async def close() -> None:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_S)

    stack.push_async_callback(close)
    address = Address(host, opened.getsockname()[1])
    log.info("registry_door", http=f"http://{address}")
    return address


class _RegistryServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the role's."""
        yield
