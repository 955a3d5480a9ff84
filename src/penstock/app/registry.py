"""A manager's model registry: where its files are, its services, what collects what nobody names; its HTTP door."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import structlog

from penstock.access.guard import Guard
from penstock.app.places import http_scheme
from penstock.app.ports import open_own_socket, open_usual
from penstock.core.cluster.addresses import Address
from penstock.core.config import Config
from penstock.manager.models.registry import ModelRegistry
from penstock.storage.metadata.base import MetadataStore
from penstock.storage.objects.base import open_objects
from penstock.wire.channels import Channels
from penstock.wire.credentials.certificates import Certificates
from penstock.wire.leader import Leader

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.app.manager import OpenManager
    from penstock.gateway.http.cluster.app import ManagerApp
    from penstock.gateway.http.doorman import Doorman
    from penstock.gateway.http.openapi import Admit

log = structlog.get_logger()
USUAL_PORT = 7412


def open_registry(
    config: Config, store: MetadataStore, tell: Callable[[str, str, str], None], stack: AsyncExitStack
) -> ModelRegistry:
    if config.cluster.join and not config.registry.objects:
        advice = "where several managers run, set registry.objects to a folder that all see, or to s3://BUCKET/PREFIX"
        log.warning("models_kept_by_one_manager", folder=str(config.data_dir / "objects"), advice=advice)
    objects = open_objects(config.registry.objects, config.data_dir / "objects", config.s3)
    registry = ModelRegistry(store, objects, config.data_dir / "uploads", config.registry, tell)
    collecting = asyncio.create_task(registry.collect_forever(), name="collect-models")
    stack.callback(collecting.cancel)
    return registry


class BehindDoor(NamedTuple):
    registry: ModelRegistry
    guard: Guard
    leader: Leader  # whom the administration asks


def behind_door(opened: "OpenManager", own: str, certificates: Certificates, stack: AsyncExitStack) -> BehindDoor:
    """`own`: the manager's socket."""
    from penstock.manager.leading.elected import ElectedManager

    manager = opened.manager
    leader = Leader(ElectedManager(manager, own), Channels(lambda: manager.managers_key(), certificates.files))
    stack.push_async_callback(leader.close)
    return BehindDoor(opened.registry, opened.guard, leader)


async def open_http_door(
    config: Config, behind: BehindDoor, host: str, certificates: Certificates, stack: AsyncExitStack
) -> Address:
    """REST, on the manager's host: the registry and the administration."""
    # Only now: `penstock serve` on one machine has no such door.
    from penstock.gateway.http.cluster.door import LIMITS, MAX_CONNECTIONS, ManagerProtocol, websocket
    from penstock.gateway.http.doorman import Doorman, machine_names
    from penstock.gateway.http.lazy import LazyApp
    from penstock.gateway.http.server import serve_door

    listen = partial(open_own_socket, host, "registry.http_port")
    opened = await open_usual(listen, config.registry.http_port, USUAL_PORT)
    doorman = Doorman(config.model_copy(update={"host": host}), behind.guard, machine_names())
    app = LazyApp(partial(_build, doorman, behind))
    limits = config.limits.model_copy(update=LIMITS)
    close = serve_door(app, opened, limits, MAX_CONNECTIONS, certificates, ManagerProtocol, websocket)
    stack.push_async_callback(close)
    address = Address(host, opened.getsockname()[1])
    log.info("registry_door", http=f"{http_scheme(config)}://{address}")
    return address


def _build(doorman: "Doorman", behind: BehindDoor) -> "ManagerApp":
    from penstock.gateway.http.cluster.app import ManagerApp, build_cluster_app
    from penstock.gateway.http.cluster.calls import ClusterCalls
    from penstock.gateway.http.cluster.registry import RegistryRest

    def build(admit: "Admit") -> "FastAPI":
        calls = ClusterCalls(behind.leader)
        return build_cluster_app(calls, version("penstock-serve"), admit, RegistryRest(behind.registry))

    return ManagerApp(doorman, build)
