"""The manager role: the control plane of a cluster, as a process of its own or inside `penstock serve`."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import structlog
from prometheus_client import CollectorRegistry

from penstock.app.gateway.clients_edge import find_manager_sockets, open_manager_edge
from penstock.app.orphans import adopt_orphans
from penstock.app.ports import reserve_port
from penstock.app.role_process import RoleRun, RoleStart, run_role, start_role_logs, tune_garbage_collection
from penstock.core.cluster.addresses import Address
from penstock.core.cluster.manager_records import LEADER_KEY, ManagerRecord
from penstock.core.config import Config
from penstock.core.errors import Unavailable
from penstock.features.edge.gateway_sockets import GatewaySockets
from penstock.storage.process_addresses import (
    check_bind,
    check_store,
    find_advertised_manager,
    find_manager_address,
    is_store,
)
from penstock.storage.server_folders import lock_data_folder
from penstock.telemetry.metrics import RolloutMetrics, share_metrics

if TYPE_CHECKING:
    from grpc_health.v1.health import aio as health_aio
    from prometheus_client.registry import Collector

    from penstock.endpoints.guard import Guard
    from penstock.features.registry.model_registry import ModelRegistry
    from penstock.manager.control_plane import ControlPlane
    from penstock.telemetry.health_endpoint import Problem
    from penstock.wire.channels import Channels
    from penstock.wire.credentials.certificates import Certificates

log = structlog.get_logger()
STORE_S = 1.5  # for the metadata store to answer a readiness check


class OpenManager(NamedTuple):
    """The parts of a running manager that its other listeners use."""

    problem: "Problem"  # returns why the manager is not ready, or an empty string
    cluster_metrics: "Callable[[], Collector]"  # returns the cluster's current metrics
    registry: "ModelRegistry"
    health: "health_aio.HealthServicer"  # of its gRPC endpoint
    guard: "Guard"  # of its endpoints
    control: "ControlPlane"
    managers: "Channels"  # to the other managers of the cluster


def run_manager(start: RoleStart) -> None:
    assert start.config is not None
    check_bind(start.config)
    check_store(start.config)
    start_role_logs("manager", start, start.config)
    with lock_data_folder(start.config.data_dir):
        run_role("manager", start, _run_manager)


async def _run_manager(run: RoleRun) -> None:
    from penstock.app.health_listeners import MANAGER_PORTS, open_health_listeners
    from penstock.app.registry_endpoint import make_http_services, open_http_endpoint
    from penstock.app.role_certificates import open_certificates

    config = run.config
    run.paths.write_config(config, only={"data_dir"})  # commands on this machine find the server by this file
    share_metrics(run.paths.metrics, run.name)
    async with AsyncExitStack() as stack:
        adopt_orphans(stack)  # processes that commands of event triggers left behind
        certificates = open_certificates(config, stack)
        address = reserve_manager(config, stack)
        me = ManagerRecord(manager_id=run.name, address=find_advertised_manager(config, address.port or 0))
        sockets = find_manager_sockets(config, run.paths.folder)
        addresses = [run.paths.manager, *([] if sockets is not None else [str(address)])]
        # Uploaded models need no folder, so the default folder may be missing.
        has_models = "models" in config.model_fields_set or config.models.exists()
        opened = await open_manager(config, stack, me, certificates, *addresses, has_models=has_models, sockets=sockets)
        cluster_metrics, health, guard = opened.cluster_metrics, opened.health, opened.guard
        await open_health_listeners(
            config, run.paths, MANAGER_PORTS, opened.problem, certificates, stack, cluster_metrics, health, guard
        )
        behind = make_http_services(opened, run.paths.manager, stack)
        registry = await open_http_endpoint(config, behind, address.host, certificates, stack, sockets)
        if sockets is not None:
            await open_manager_edge(config, run.paths.folder, address, registry, sockets, certificates, stack)
        log.info("manager_started", address=me.address, models=str(config.models))
        tune_garbage_collection()
        await run.stop.wait()
        log.info("shutdown_started")


def reserve_manager(config: Config, stack: AsyncExitStack) -> Address:
    """Reserve the manager's port for other hosts, so that no other process can share it; return its address."""
    wanted = find_manager_address(config)
    port = stack.enter_context(reserve_port(wanted.host, wanted.port or 0, "--bind")).getsockname()[1]
    return Address(wanted.host, port)


async def open_manager(
    config: Config,
    stack: AsyncExitStack,
    own_record: ManagerRecord,
    certificates: "Certificates",
    *addresses: str,
    is_fresh: bool = False,
    has_models: bool = True,
    sockets: GatewaySockets | None = None,
) -> "OpenManager":
    """Start a manager, its features and its gRPC server.

    `is_fresh`: no worker or gateway of this manager runs yet. `sockets`: the sockets of a manager behind an edge.
    """
    # Imported here, because a server that joins a cluster has no manager.
    from grpc_health.v1.health import aio as health_aio
    from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

    from penstock.app.registry_endpoint import open_registry
    from penstock.app.role_certificates import make_guard
    from penstock.features.admin.admin_service import ClusterService
    from penstock.features.admin.cluster_metrics import ClusterOverview
    from penstock.features.admin.cluster_watch import StatusSource
    from penstock.features.direct.direct_service import DirectService
    from penstock.features.direct.discovery import Discovery
    from penstock.features.events.triggers import Triggers
    from penstock.features.keys.access_service import AccessService
    from penstock.features.keys.audit import Audit, AuditedStore
    from penstock.features.keys.keys import Keys
    from penstock.features.keys.signing import Signing
    from penstock.features.registry.registry_service import ModelRegistryService
    from penstock.features.rollouts.rollout_service import RolloutService
    from penstock.features.rollouts.rollouts import Rollouts
    from penstock.features.search.registered.policy_registry import PolicyRegistry
    from penstock.features.search.registered.policy_service import PolicyService
    from penstock.manager.control_plane import ControlPlane
    from penstock.manager.deploying.deployer import Deployer
    from penstock.manager.leading.election import LEASE_S, SOLE_LEASE_S
    from penstock.manager.manager import Manager
    from penstock.manager.manager_server import serve_manager
    from penstock.pb.v1.access_pb2_grpc import add_AccessServicer_to_server, add_DirectServicer_to_server
    from penstock.pb.v1.cluster_pb2_grpc import (
        add_ClusterServicer_to_server,
        add_PoliciesServicer_to_server,
        add_RolloutsServicer_to_server,
    )
    from penstock.pb.v1.registry_pb2_grpc import add_ModelRegistryServicer_to_server
    from penstock.storage.metadata.metadata_store import MetadataStore
    from penstock.storage.metadata.opening import DEFAULT_URL, open_metadata
    from penstock.wire.channels import Channels

    is_shared = is_store(config.cluster.join)
    store = await open_metadata(config.cluster.join if is_shared else DEFAULT_URL, config.data_dir)
    stack.push_async_callback(store.close)
    triggers = Triggers(config.triggers)
    triggers.start()
    stack.push_async_callback(triggers.close)
    audit = Audit(store)
    control = ControlPlane(
        store,
        own_record,
        LEASE_S if is_shared else SOLE_LEASE_S,
        plan_audit=audit.plan,
        on_event=triggers.receive,
    )
    registry = open_registry(config, cast(MetadataStore, AuditedStore(store, audit)), control.events.emit, stack)
    deployer = Deployer(control, config.models if has_models else None, registry.choose, config.watch)
    guard = make_guard(config, find_manager_address(config).host)
    secret = config.access.secret
    keys = Keys(control, guard, secret.get_secret_value().encode() if secret is not None else b"")
    signing = Signing(control)
    rollouts = Rollouts(control, deployer, RolloutMetrics(CollectorRegistry()))
    overview = ClusterOverview(control)
    policies = PolicyRegistry(control)
    manager = Manager(control, deployer, [keys, signing, audit, rollouts, policies, overview], is_fresh=is_fresh)
    stack.push_async_callback(manager.close)
    await manager.start(is_sole=not is_shared)

    managers = Channels(lambda: keys.managers_key, certificates.files)
    hosts = (config.host, find_manager_address(config).host)
    are_required = any(config.find_key_requirement(host) == "required" for host in hosts)
    access, rolling = AccessService(keys, audit, signing, are_required), RolloutService(rollouts)
    watched: dict[str, StatusSource] = {"keys": access.list_statuses, "rollouts": rolling.list_statuses}
    cluster = ClusterService(control, deployer, overview, managers, watched)
    discovery = Discovery(control, keys, signing, bool(config.tls.cert))
    health = health_aio.HealthServicer()
    services = (
        partial(add_ClusterServicer_to_server, cluster),
        partial(add_RolloutsServicer_to_server, rolling),
        partial(add_PoliciesServicer_to_server, PolicyService(policies)),
        partial(add_ModelRegistryServicer_to_server, ModelRegistryService(registry)),
        partial(add_AccessServicer_to_server, access),
        partial(add_DirectServicer_to_server, DirectService(discovery)),
        partial(add_HealthServicer_to_server, health),
    )
    serve = partial(serve_manager, manager, services=services, guard=guard, certificates=certificates)
    servers = [await serve(*addresses)]
    if sockets is not None:
        servers.append(await serve(f"unix:{sockets.grpc}", is_behind_edge=True))
    for server in servers:
        stack.push_async_callback(server.stop, 0.5)
    stack.push_async_callback(control.election.close)  # closed first, so that another manager can lead at once

    async def problem() -> str:
        try:
            async with asyncio.timeout(STORE_S):
                await store.get(LEADER_KEY)
        except (TimeoutError, Unavailable):
            return "the metadata store does not answer"
        return "" if control.epoch or control.election.leader else "no manager leads"

    return OpenManager(problem, overview.make_collector, registry, health, guard, control, managers)
