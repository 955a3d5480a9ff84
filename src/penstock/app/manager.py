"""The manager role: the control plane of a cluster, as a process of its own or inside `penstock serve`."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import structlog
from prometheus_client import CollectorRegistry

from penstock.app.folders import data_folder
from penstock.app.orphans import adopt_orphans
from penstock.app.places import advertised_manager, check_bind, check_store, is_store, manager_address
from penstock.app.ports import reserve_port
from penstock.app.process import RoleRun, RoleStart, run_role, spare_collector, start_role_logs
from penstock.core.cluster.addresses import Address
from penstock.core.cluster.leaders import LEADER, ManagerRecord
from penstock.core.config import Config
from penstock.core.errors import Unavailable
from penstock.telemetry.metrics import RolloutMetrics, share_metrics

if TYPE_CHECKING:
    from grpc_health.v1.health import aio as health_aio
    from prometheus_client.registry import Collector

    from penstock.access.guard import Guard
    from penstock.manager.manager import Manager
    from penstock.manager.models.registry import ModelRegistry
    from penstock.telemetry.door import Problem
    from penstock.wire.credentials.certificates import Certificates

log = structlog.get_logger()
STORE_S = 1.5  # what the metadata store gets to show that it is there


class OpenManager(NamedTuple):
    problem: "Problem"  # why it is not ready
    look: "Callable[[], Collector]"  # the cluster's metrics, of the moment
    registry: "ModelRegistry"
    health: "health_aio.HealthServicer"  # of its gRPC door
    guard: "Guard"  # of its doors
    manager: "Manager"


def run_manager(start: RoleStart) -> None:
    assert start.config is not None
    check_bind(start.config)
    check_store(start.config)
    start_role_logs("manager", start, start.config)
    with data_folder(start.config.data_dir):
        run_role("manager", start, _manage)


async def _manage(run: RoleRun) -> None:
    from penstock.app.certificates import open_certificates
    from penstock.app.doors import MANAGER_DOOR, open_health_door
    from penstock.app.registry import behind_door, open_http_door

    config = run.config
    run.places.write_config(config, only={"data_dir"})  # commands of this machine find it by that
    share_metrics(run.places.metrics, run.name)
    async with AsyncExitStack() as stack:
        adopt_orphans(stack)  # of commands that events call
        certificates = open_certificates(config, stack)
        address = reserve_manager(config, stack)
        me = ManagerRecord(manager_id=run.name, address=advertised_manager(config, address.port or 0))
        # What is uploaded needs no folder: one that was not named may be missing.
        has_models = "models" in config.model_fields_set or config.models.exists()
        opened = await open_manager(
            config, stack, me, certificates, run.places.manager, str(address), has_models=has_models
        )
        look, health, guard = opened.look, opened.health, opened.guard
        await open_health_door(
            config, run.places, MANAGER_DOOR, opened.problem, certificates, stack, look, health, guard
        )
        behind = behind_door(opened, run.places.manager, certificates, stack)
        await open_http_door(config, behind, address.host, certificates, stack)
        log.info("managing", address=me.address, models=str(config.models))
        spare_collector()
        await run.stop.wait()
        log.info("stopping")


def reserve_manager(config: Config, stack: AsyncExitStack) -> Address:
    """The manager's port for other hosts, which nobody else shall share."""
    wanted = manager_address(config)
    port = stack.enter_context(reserve_port(wanted.host, wanted.port or 0, "--bind")).getsockname()[1]
    return Address(wanted.host, port)


async def open_manager(
    config: Config,
    stack: AsyncExitStack,
    me: ManagerRecord,
    certificates: "Certificates",
    *addresses: str,
    is_fresh: bool = False,
    has_models: bool = True,
) -> "OpenManager":
    """`is_fresh`: its workers and gateways are all yet to be started."""
    # Imported only now: the children of `serve` do the same meanwhile.
    from grpc_health.v1.health import aio as health_aio
    from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

    from penstock.app.certificates import make_guard
    from penstock.app.registry import open_registry
    from penstock.manager.access.audit import Audit, AuditedStore
    from penstock.manager.access.keys import Keys
    from penstock.manager.access.service import AccessService
    from penstock.manager.direct.discovery import Discovery
    from penstock.manager.direct.service import DirectService
    from penstock.manager.direct.signing import Signing
    from penstock.manager.leading.election import SOLE_LEASE_S
    from penstock.manager.lives import LifeRules
    from penstock.manager.manager import Manager
    from penstock.manager.models.service import ModelRegistryService
    from penstock.manager.overview import Overview
    from penstock.manager.rollouts.runs import Rollouts
    from penstock.manager.rollouts.service import RolloutService
    from penstock.manager.server import serve_manager
    from penstock.manager.triggers import Triggers
    from penstock.pb.v1.access_pb2_grpc import add_AccessServicer_to_server, add_DirectServicer_to_server
    from penstock.pb.v1.cluster_pb2_grpc import add_RolloutsServicer_to_server
    from penstock.pb.v1.registry_pb2_grpc import add_ModelRegistryServicer_to_server
    from penstock.storage.metadata.base import MetadataStore
    from penstock.storage.metadata.opening import DEFAULT_URL, open_metadata

    is_shared = is_store(config.cluster.join)
    store = await open_metadata(config.cluster.join if is_shared else DEFAULT_URL, config.data_dir)
    stack.push_async_callback(store.close)
    manager = Manager(
        store,
        config.models if has_models else None,
        me,
        config.cluster.lease_s if is_shared else SOLE_LEASE_S,
        LifeRules(**config.cluster.model_dump(include={"suspect_s", "offline_s", "reconnect_s", "forget_s"})),
        is_fresh=is_fresh,
    )
    stack.push_async_callback(manager.close)
    guard = make_guard(config, manager_address(config).host)
    secret = config.access.secret
    keys = Keys(manager, guard, secret.get_secret_value().encode() if secret is not None else b"")
    audit = Audit(manager, store)
    signing = Signing(manager, config.access.signing_rotate_s)
    registry = open_registry(config, cast(MetadataStore, AuditedStore(store, audit)), manager.events.tell, stack)
    manager.find_version = registry.choose
    triggers = Triggers(config.triggers)
    manager.events.on_event.append(triggers.told)
    stack.push_async_callback(triggers.close)
    triggers.start()
    rollouts = Rollouts(manager, RolloutMetrics(CollectorRegistry()))
    await manager.start(is_sole=not is_shared)
    signing.start()
    stack.push_async_callback(signing.close)
    rollouts.start()
    stack.push_async_callback(rollouts.close)
    health = health_aio.HealthServicer()
    add_health = partial(add_HealthServicer_to_server, health)
    access, rolling = AccessService(keys, audit, signing), RolloutService(rollouts)
    manager.watched |= {"keys": access.statuses, "rollouts": rolling.statuses}
    add_access = partial(add_AccessServicer_to_server, access)
    add_rollouts = partial(add_RolloutsServicer_to_server, rolling)
    discovery = Discovery(manager, keys, signing, bool(config.tls.cert))
    add_direct = partial(add_DirectServicer_to_server, DirectService(discovery))
    add_registry = partial(add_ModelRegistryServicer_to_server, ModelRegistryService(registry))
    services = (add_rollouts, add_registry, add_access, add_direct, add_health)
    server = await serve_manager(manager, *addresses, further=services, guard=guard, certificates=certificates)
    stack.push_async_callback(server.stop, 0.5)
    stack.push_async_callback(manager.election.close)  # first: another may lead at once

    async def problem() -> str:
        try:
            async with asyncio.timeout(STORE_S):
                await store.get(LEADER)
        except (TimeoutError, Unavailable):
            return "its metadata store does not answer"
        return "" if manager.epoch or manager.election.leader else "no manager leads"

    return OpenManager(problem, Overview(manager).collector, registry, health, guard, manager)
