"""The search of a gateway: its blocks, those of other clusters, and the rankers of all policies."""

from prometheus_client import CollectorRegistry

from penstock.app.gateway.directory_blocks import DirectoryBlocks
from penstock.core.blocks import ClusterView
from penstock.core.config import Config
from penstock.features.search.block_catalogue import BlockCatalogue
from penstock.features.search.block_search import BlockSearch, MeasuredRanker, Ranker
from penstock.features.search.local_blocks import LocalBlocks
from penstock.features.search.registered.registered_ranker import RegisteredRanker
from penstock.features.search.semantic.semantic_ranker import SemanticRanker
from penstock.router.dispatcher import Dispatcher
from penstock.serving.resolve import Resolver
from penstock.telemetry.metrics import SearchMetrics


class GatewaySearch:
    """A gateway's search for blocks, performed by `blocks`. A gateway in a worker's process uses no directory."""

    def __init__(
        self,
        gateway_id: str,
        config: Config,
        resolver: Resolver,
        dispatcher: Dispatcher,
        registry: CollectorRegistry,
        is_in_worker: bool,
    ) -> None:
        metrics = SearchMetrics(registry)
        local = LocalBlocks(config.cluster.id, config.cluster.metadata, resolver, dispatcher)
        self.directory = None if is_in_worker else DirectoryBlocks(config, gateway_id, resolver, dispatcher)
        catalogue = BlockCatalogue([local, *(self.directory.sources if self.directory is not None else ())])
        self._policies = RegisteredRanker(catalogue, config.search, metrics)
        self._semantic = SemanticRanker(catalogue, resolver, dispatcher, config.search, metrics, config.data_dir)
        rankers: list[Ranker] = [MeasuredRanker(catalogue), self._semantic, self._policies]
        self.blocks = BlockSearch(catalogue, rankers, config.search, metrics)

    def start(self) -> None:
        if self.directory is not None:
            self.directory.start()
        self._semantic.start()

    def cluster_changed(self, cluster_view: ClusterView) -> None:
        self._policies.records_changed(cluster_view.records)
        if self.directory is not None:
            self.directory.gateways_changed(cluster_view.gateways)

    async def leave(self) -> None:
        """End the cluster's registration with the directory, if this gateway publishes it."""
        if self.directory is not None:
            await self.directory.close()

    async def close(self) -> None:
        await self._semantic.close()
        await self._policies.close()
