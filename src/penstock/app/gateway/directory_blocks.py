"""A gateway's use of the directory: it publishes its cluster's blocks there, and finds the blocks of other clusters."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from penstock.core.blocks import GatewayMember
from penstock.core.config import Config
from penstock.core.errors import OtherCluster
from penstock.core.principals import Principal
from penstock.features.directory.announcer import UNNAMED
from penstock.features.search.documents import BlockDocument, BlockSource, InstanceMetrics, make_document
from penstock.features.search.local_blocks import KnownBlocks, LocalBlocks, SlotStates

if TYPE_CHECKING:
    from penstock.features.directory.announcer import Announcer
    from penstock.features.directory.remote_blocks import RemoteBlocks

log = structlog.get_logger()
PUBLISHED = (
    *("block_id", "model", "version", "state", "task", "description", "tags", "labels", "metadata", "replicas"),
    *("platform", "device", "precision"),
)


class RemoteSource:
    """A `BlockSource` of other clusters' blocks, as the directory lists them."""

    def __init__(self, remote: "RemoteBlocks") -> None:
        self._remote = remote
        self._made: tuple[int, list[BlockDocument]] = (-1, [])

    @property
    def revision(self) -> int:
        return self._remote.revision

    def documents(self) -> Iterator[BlockDocument]:
        if self._made[0] != self._remote.revision:
            self._made = self._remote.revision, [*self._make_documents()]
        return iter(self._made[1])

    def instances(self, document: BlockDocument) -> Sequence[InstanceMetrics]:
        """Return nothing: a directory has no live metrics."""
        return ()

    def is_callable(self, document: BlockDocument) -> bool:
        """Return False: a gateway calls the blocks of its own cluster only."""
        return False

    def _make_documents(self) -> Iterator[BlockDocument]:
        for block in self._remote.blocks:
            cluster = {"id": block.cluster_id, "name": block.cluster_id, "metadata": block.cluster_metadata}
            yield make_document(cluster, **block.model_dump(include=set(PUBLISHED)))


class DirectoryBlocks:
    """Publishes this cluster's blocks, and lists those of other clusters.

    Does nothing without a directory. Publishes nothing until the cluster has a name (`cluster.id`).
    """

    def __init__(self, config: Config, gateway_id: str, known: KnownBlocks, slots: SlotStates) -> None:
        self._config = config
        self._gateway_id = gateway_id
        # Not shared with the search, which may stop reading before the last document.
        self._local = LocalBlocks(config.cluster.id, config.cluster.metadata, known, slots)
        self._gateways: Sequence[GatewayMember] = ()
        self._remote: RemoteBlocks | None = None
        self._announcer: Announcer | None = None
        self.sources: list[BlockSource] = []
        if config.directory.url:
            self._connect()

    def _connect(self) -> None:
        # Imported here, because most gateways use no directory.
        from penstock.features.directory.announcer import AnnouncedBlocks, Announcer, open_client
        from penstock.features.directory.remote_blocks import RemoteBlocks

        settings, cluster_id = self._config.directory, self._config.cluster.id
        client = open_client(self._config)
        self._remote = RemoteBlocks(client, cluster_id)
        self.sources = [RemoteSource(self._remote)]
        if cluster_id == UNNAMED:
            log.info("directory_blocks_not_published", advice="set cluster.id to a name that no other cluster has")
            return
        blocks = AnnouncedBlocks(client, cluster_id, self.make_cluster_record, settings.lease_s)
        self._announcer = Announcer(blocks, settings.lease_s, settings.url)

    def start(self) -> None:
        if self._remote is not None:
            self._remote.start()
        if self._announcer is not None:
            self._announcer.start()

    async def close(self) -> None:
        if self._announcer is not None:
            await self._announcer.close()
        if self._remote is not None:
            await self._remote.close()

    def gateways_changed(self, gateways: Sequence[GatewayMember]) -> None:
        self._gateways = gateways

    def find_refusal(self, block_id: str, principal: Principal) -> OtherCluster | None:
        """Return the error for a request that names a block of another cluster, or None if no cluster has the block."""
        block = None if self._remote is None else self._remote.find(block_id)
        if block is None or not principal.may_use(block.model, block_id):
            return None
        where = f"at {block.address}" if block.address else "which lists no address"
        return OtherCluster(
            f"block '{block_id}' of model '{block.model}' is served by the cluster '{block.cluster_id}', {where}; this "
            "gateway runs the blocks of its own cluster only: send the request there"
        )

    def make_cluster_record(self) -> dict[str, Any] | None:
        """Return the cluster's record for the directory, or None unless this is the gateway with the lowest id."""
        if not self._gateways or min(self._gateways).gateway_id != self._gateway_id:
            return None
        return {
            "cluster_metadata": self._config.cluster.metadata,
            "public_url": self._config.directory.public_url,
            "grpc_addresses": [each.address for each in self._gateways if each.address],
            "blocks": [{name: each.values[name] for name in PUBLISHED} for each in self._local.documents()],
        }
