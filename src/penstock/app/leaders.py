"""Finds the leading manager: at a unix socket, among the configured managers, or in the managers' etcd store."""

from contextlib import AsyncExitStack

from penstock.core.config import Config
from penstock.storage.process_addresses import ServerPaths, is_store
from penstock.wire.channels import Channels
from penstock.wire.leader_connection import FixedLeader, LeaderClient, LeaderSource
from penstock.wire.leader_search import LeaderSearch


def open_leader(config: Config, paths: ServerPaths, stack: AsyncExitStack) -> LeaderClient:
    channels = Channels.from_config(config)
    leader = LeaderClient(_choose_source(paths.list_managers(config), channels), channels)
    stack.push_async_callback(leader.close)
    return leader


def _choose_source(managers: tuple[str, ...], channels: Channels) -> LeaderSource:
    if is_store(managers[0]):
        # Imported here, because few roles use etcd.
        from penstock.storage.metadata.etcd import EtcdMetadataStore
        from penstock.storage.metadata.stored_leader import StoredLeader

        return StoredLeader(EtcdMetadataStore.from_url(managers[0]))
    if managers[0].startswith("unix:"):
        return FixedLeader(managers[0])
    return LeaderSearch(managers, channels=channels)
