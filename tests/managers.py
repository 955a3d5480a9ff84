"""Makes managers in the test's process."""

from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.blocks import BlockView
from penstock.core.cluster.manager_records import ManagerRecord
from penstock.features.admin.admin_service import ClusterService
from penstock.features.admin.cluster_metrics import ClusterOverview
from penstock.manager.control_plane import ControlPlane
from penstock.manager.deploying.deployer import Deployer
from penstock.manager.manager import Manager
from penstock.manager.manager_server import AddService
from penstock.pb.v1.cluster_pb2_grpc import add_ClusterServicer_to_server
from penstock.storage.metadata.metadata_store import MetadataStore
from penstock.wire.channels import PLAIN_CHANNELS


def make_manager(
    store: MetadataStore,
    repository: Path | None = None,
    me: ManagerRecord | None = None,
    *,
    is_fresh: bool = False,
    is_watching: bool = False,
    **settings: Any,
) -> Manager:
    """Return a manager; `settings` are those of `ControlPlane`."""
    control = ControlPlane(store, me, **settings)
    return Manager(control, Deployer(control, repository, is_watching=is_watching), is_fresh=is_fresh)


def administration(manager: Manager) -> AddService:
    """Return a function that adds the administration service to the manager's gRPC server."""
    service = ClusterService(manager.control, manager.deployer, ClusterOverview(manager.control), PLAIN_CHANNELS)
    return partial(add_ClusterServicer_to_server, service)


def list_block_views(manager: Manager) -> list[BlockView]:
    """Return the blocks as gateways see them."""
    return manager.control.term.publisher.list_blocks()
