"""Where a role finds the manager that leads: at a socket, among the managers that it was told of, or in their store."""

from contextlib import AsyncExitStack

from penstock.app.places import ServerPlaces, is_store
from penstock.core.config import Config
from penstock.wire.asking import AskedManagers
from penstock.wire.channels import Channels
from penstock.wire.leader import Leader, LeaderSource, SoleManager


def open_leader(config: Config, places: ServerPlaces, stack: AsyncExitStack) -> Leader:
    channels = Channels.of(config)
    leader = Leader(_source(places.managers(config), channels), channels)
    stack.push_async_callback(leader.close)
    return leader


def _source(managers: tuple[str, ...], channels: Channels) -> LeaderSource:
    if is_store(managers[0]):
        # Here and not above: few need it.
        from penstock.storage.metadata.etcd import EtcdMetadataStore
        from penstock.storage.metadata.leader import StoredLeader

        return StoredLeader(EtcdMetadataStore.of(managers[0]))
    if managers[0].startswith("unix:"):
        return SoleManager(managers[0])
    return AskedManagers(managers, channels=channels)
